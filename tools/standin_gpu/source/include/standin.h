// What the libraries of the stand-in share. All of it lives in libcuda.so.1; the others link to that.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace standin {

// Result codes that the CUDA runtime and the driver share by value.
enum Code {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kOldDriver = 35,
    kInvalidFunction = 98,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kInvalidHandle = 400,
    kNotFound = 500,
    kNotReady = 600,
    kIllegalAddress = 700,
    kLaunchFailure = 719,
    kNotSupported = 801,
    kCaptureForbids = 900,
    kCaptureInvalidated = 901,
};

// ---- devices (devices.cpp)

struct Properties {
    std::string name;
    std::string driver_version;
    int count = 0;
    size_t memory_bytes = 0;
    int major = 0;
    int minor = 0;
    int multiprocessors = 0;
    size_t l2_cache_bytes = 0;
};

// Each context takes device memory on a GPU; about 500 MiB on Hopper.
constexpr size_t kContextBytes = size_t{512} << 20;
constexpr int kMaxDevices = 16;

const Properties& properties();
const std::string& state_folder();
int device_count();
// CUDA's version of the driver, as cuDriverGetVersion writes it: 1000 * major + 10 * minor.
int driver_cuda_version();
int current_device();
int set_device(int device);
int physical_index(int device);
void* context_of(int device);
int device_of_context(const void* context);
int attribute(int attribute, int device);
void uuid_of(int device, unsigned char bytes[16]);

// Device memory, counted over all processes of the run.
bool take_bytes(int device, size_t bytes);
void give_bytes(int device, size_t bytes);
size_t free_bytes(int device);

// ---- faults (faults.cpp)

// Remembers the text for fault_text of this thread, and returns the code.
int fault(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
// "" without a fault of that code in this thread.
const char* fault_text(int code);
int unknown_function(const char* name);
// File and line of the Python code that this thread runs, libraries left out; "" outside Python.
std::string python_caller();
// False in threads of libraries, such as torch's watchdog over its collectives.
bool is_python_thread();
// A strict run (tools/standin_gpu/run.py --strict) checks what a GPU does not.
bool is_strict();
void log_line(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- memory (memory.cpp)

enum class Kind { kDevice, kPinned, kRegistered, kReserved };

struct Region {
    uintptr_t base;
    size_t bytes;
    Kind kind;
    int device;
    int file;           // -1 for host memory
    bool is_mapped;     // false: reserved addresses without memory
    uint64_t physical;  // handle of cuMemCreate, or 0
};

int allocate(void** address, size_t bytes, int device);
int allocate_pinned(void** address, size_t bytes);
int deallocate(void* address);
int register_host(void* address, size_t bytes);
int unregister_host(void* address);
bool find_region(const void* address, Region* region);
// Fails where part of the range is unmapped or outside its allocation; pageable host memory passes.
int check_range(const void* address, size_t bytes, const char* role);
int copy(void* target, const void* source, size_t bytes, void* stream);
int copy_now(void* target, const void* source, size_t bytes);
int fill(void* target, int value, size_t bytes, void* stream);
int export_handle(void* address, void* handle);
int import_handle(void** address, const void* handle);

// ---- streams and events (streams.cpp)

struct Access;

void* make_stream(unsigned flags, int priority);
void drop_stream(void* stream);
int stream_device(void* stream);
unsigned stream_flags(void* stream);
int stream_priority(void* stream);
unsigned long long stream_id(void* stream);
int synchronize_stream(void* stream);
int query_stream(void* stream);
int synchronize_device();
// Before work that this thread submits: checks the stream's device, waits for what is queued in the stream (unless the
// work is queued, too), and counts the work.
int begin_work(void* stream, const char* name, bool is_queued = false);
// In a strict run: fails where another stream's work on the memory was not waited for.
int note_accesses(void* stream, const std::vector<Access>& accesses);
// Work of the stream's own thread. Its error is that of the next wait for it.
int enqueue(void* stream, std::function<int()> operation);
// Set by the numbers' library: torch's current stream of a device, null for the default one.
void set_torch_stream_query(void* (*query)(int device));
void* current_torch_stream(int device);
void* make_event(unsigned flags);
void drop_event(void* event);
int record_event(void* event, void* stream);
int synchronize_event(void* event);
int query_event(void* event);
int elapsed_milliseconds(void* begin, void* end, float* milliseconds);
int wait_for_event(void* stream, void* event);

// ---- capture and graphs (streams.cpp)

int begin_capture(void* stream, int mode);
int end_capture(void* stream, void** graph);
bool capture_status(void* stream, unsigned long long* id, void** graph);
int exchange_capture_mode(int* mode);
// Fails while a capture forbids calls such as cudaMalloc and synchronisation.
int check_capture_allows(const char* call);
// Adds an operation to the capture of the stream.
void record_operation(void* stream, std::function<int()> operation);
// Keeps a copy of memory that is about to be written in a capture; the end of the capture puts it back.
void keep_until_capture_ends(void* stream, const void* address, size_t bytes);
size_t graph_size(void* graph);
int launch_graph(void* graph, void* stream);
void drop_graph(void* graph);

}  // namespace standin
