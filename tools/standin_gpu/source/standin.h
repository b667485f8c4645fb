// What the libraries of the stand-in share. All of it lives in libcuda.so.1; the others link to that.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace standin {

// Result codes that the CUDA runtime and the driver share by value.
enum Code {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kInvalidFunction = 98,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kInvalidHandle = 400,
    kNotFound = 500,
    kIllegalAddress = 700,
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

void* make_stream(unsigned flags, int priority);
void drop_stream(void* stream);
int stream_device(void* stream);
unsigned stream_flags(void* stream);
int stream_priority(void* stream);
unsigned long long stream_id(void* stream);
int synchronize_stream(void* stream);
int synchronize_device();
int check_launch(void* stream, const char* name);
void* make_event(unsigned flags);
void drop_event(void* event);
int record_event(void* event, void* stream);
int synchronize_event(void* event);
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
void record_operation(void* stream, std::function<void()> operation);
int launch_graph(void* graph, void* stream);
void drop_graph(void* graph);

}  // namespace standin
