// Streams, events and graphs. A kernel does its work at once. A collective, and in a strict run a copy of pinned memory, is
// done by a thread of its stream while the caller goes on, as on a GPU.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "accesses.h"
#include "pinned.h"
#include "standin.h"

namespace standin {
namespace {

// Values of cudaStreamCaptureMode.
constexpr int kGlobal = 0;
constexpr int kThreadLocal = 1;
constexpr int kRelaxed = 2;

constexpr unsigned kNonBlocking = 1;  // cudaStreamNonBlocking

struct Graph;

struct Stream {
    int device;
    unsigned flags;
    int priority;
    unsigned long long id;
    bool is_default = false;
    Graph* capture = nullptr;
    Clock known;
    // The queue has a mutex of its own: its operations may block, so the mutex of all streams is never held for them.
    std::mutex queue_mutex;
    std::condition_variable queue_changed;
    std::deque<std::function<int()>> queue;
    unsigned long long queued = 0;  // operations ever queued
    unsigned long long done = 0;
    unsigned long long wanted = 0;  // that something waits for
    bool has_worker = false;
    int error = 0;  // of an operation, until a wait reports it
    std::string error_text;
};

struct Event {
    int device;
    bool is_recorded = false;
    double milliseconds = 0;
    unsigned long long capture_id = 0;  // 0: recorded outside a capture
    Stream* stream = nullptr;
    unsigned long long queued = 0;  // operations of the stream's queue before the event
    Clock known;
};

struct Graph {
    unsigned long long id;
    int mode;
    long thread;
    bool is_broken = false;
    std::vector<std::function<int()>> operations;
    std::vector<Access> accesses;
    std::set<Stream*> streams;
    std::vector<std::pair<void*, std::vector<char>>> before;  // memory that the capture wrote, as it was
};

std::recursive_mutex& mutex() {
    static auto* value = new std::recursive_mutex;
    return *value;
}
using Lock = std::lock_guard<std::recursive_mutex>;

std::set<Graph*>& captures() {
    static auto* active = new std::set<Graph*>;
    return *active;
}

std::vector<Stream*>& streams() {
    static auto* all = new std::vector<Stream*>;
    return *all;
}

// What the host has waited for. One clock for all threads: what one of them knows, it may have passed on.
Clock& host() {
    static auto* clock = new Clock;
    return *clock;
}

// The host has waited for the operations of a clock.
void know(const Clock& clock) {
    join(&host(), clock);
    open_to_host(host());
}

unsigned long long next_id = 1;
thread_local int thread_mode = kGlobal;

Stream* add_stream(unsigned flags, int priority) {
    auto* stream = new Stream{current_device(), flags, priority, next_id++};
    streams().push_back(stream);
    return stream;
}

Stream* stream_at(void* handle) {
    static Stream* defaults[kMaxDevices];
    // Handles 0, 1 and 2 are the default streams of the current device.
    if (reinterpret_cast<uintptr_t>(handle) > 2) return static_cast<Stream*>(handle);
    Lock lock(mutex());
    Stream*& stream = defaults[current_device()];
    if (!stream) {
        stream = add_stream(0, 0);
        stream->is_default = true;
    }
    return stream;
}

Graph* active_capture(unsigned long long id) {
    for (Graph* graph : captures())
        if (graph->id == id) return graph;
    return nullptr;
}

// CUDA ends a capture by error once it sees a call that is not permitted.
int break_capture(Graph* graph, const char* call) {
    graph->is_broken = true;
    return fault(kCaptureForbids, "%s while a stream is captured", call);
}

double now_milliseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

// A strict run starts an operation this late unless something waits for it, so that a missing wait shows.
constexpr auto kDelay = std::chrono::milliseconds(500);

// The thread of a stream: runs its queued operations in order. An error drops those that follow.
void work_off(Stream* stream) {
    mark_working_thread();
    std::unique_lock<std::mutex> lock(stream->queue_mutex);
    while (true) {
        stream->queue_changed.wait(lock, [=] { return !stream->queue.empty(); });
        if (is_strict())
            stream->queue_changed.wait_for(lock, kDelay, [=] { return stream->wanted > stream->done; });
        const auto operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        lock.unlock();
        const int code = operation();
        lock.lock();
        stream->done++;
        if (code) {
            stream->error = code;
            stream->error_text = fault_text(code);
            stream->queue.clear();
            stream->done = stream->queued;
        }
        stream->queue_changed.notify_all();
    }
}

// The error of a stream's operation, once. The caller holds the mutex of the queue.
int reported_error(Stream* stream) {
    const int code = stream->error;
    stream->error = 0;
    return code ? fault(code, "%s", stream->error_text.c_str()) : code;
}

int wait_for_queue(Stream* stream, unsigned long long count) {
    std::unique_lock<std::mutex> lock(stream->queue_mutex);
    stream->wanted = std::max(stream->wanted, count);
    stream->queue_changed.notify_all();
    stream->queue_changed.wait(lock, [=] { return stream->done >= count; });
    return reported_error(stream);
}

unsigned long long queued_operations(Stream* stream) {
    std::lock_guard<std::mutex> lock(stream->queue_mutex);
    return stream->queued;
}

int wait_for_queue(Stream* stream) { return wait_for_queue(stream, queued_operations(stream)); }

int query_queue(Stream* stream, unsigned long long count) {
    std::lock_guard<std::mutex> lock(stream->queue_mutex);
    if (stream->done < count) return kNotReady;
    // Left to a thread that can show where the program was.
    if (stream->error && !is_python_thread()) return kNotReady;
    return reported_error(stream);
}

int wait_for_queues_of_device() {
    std::vector<Stream*> all;
    {
        Lock lock(mutex());
        all = streams();
    }
    for (Stream* stream : all)
        if (stream->device == current_device())
            if (const int code = wait_for_queue(stream)) return code;
    return kSuccess;
}

// The default stream and the blocking ones of its device wait for each other, as CUDA's legacy default stream does.
void join_default_stream(Stream* stream) {
    if (stream->flags & kNonBlocking) return;
    for (Stream* other : streams())
        if (other->device == stream->device && !(other->flags & kNonBlocking) && other->is_default != stream->is_default)
            join(&stream->known, other->known);
}

}  // namespace

// Whether a stream of torch has work that the host has not waited for. Null: torch's current stream is the default one.
static bool is_busy(void* handle) {
    if (!handle) return false;
    Lock lock(mutex());
    const auto* stream = static_cast<Stream*>(handle);
    const auto newest = stream->known.find(stream->id);
    const auto waited = host().find(stream->id);
    return newest != stream->known.end() && (waited == host().end() || waited->second < newest->second);
}

static void* (*torch_stream_query)(int device) = nullptr;
void set_torch_stream_query(void* (*query)(int device)) { torch_stream_query = query; }
void* current_torch_stream(int device) { return torch_stream_query ? torch_stream_query(device) : nullptr; }

void* make_stream(unsigned flags, int priority) {
    Lock lock(mutex());
    return add_stream(flags, priority);
}

// Kept, some bytes each: torch may still ask a dropped stream for its device.
void drop_stream(void*) {}

int stream_device(void* stream) { return stream_at(stream)->device; }
unsigned stream_flags(void* stream) { return stream_at(stream)->flags; }
int stream_priority(void* stream) { return stream_at(stream)->priority; }
unsigned long long stream_id(void* stream) { return stream_at(stream)->id; }

int check_capture_allows(const char* call) {
    Lock lock(mutex());
    if (thread_mode == kRelaxed) return kSuccess;
    for (Graph* graph : captures()) {
        const bool is_own = graph->thread == syscall(SYS_gettid);
        // Modes of the capture and of the calling thread: cudaThreadExchangeStreamCaptureMode sets the latter.
        const bool is_forbidden = is_own ? graph->mode != kRelaxed : graph->mode == kGlobal && thread_mode == kGlobal;
        if (is_forbidden) return break_capture(graph, call);
    }
    return kSuccess;
}

namespace {

int check_synchronisation(Stream* stream) {
    Lock lock(mutex());
    if (stream->capture) return break_capture(stream->capture, "synchronisation of the captured stream");
    return check_capture_allows("stream synchronisation");
}

int know_stream(Stream* stream) {
    Lock lock(mutex());
    join_default_stream(stream);
    know(stream->known);
    return kSuccess;
}

}  // namespace

int synchronize_stream(void* handle) {
    Stream* stream = stream_at(handle);
    if (const int code = check_synchronisation(stream)) return code;
    if (const int code = wait_for_queue(stream)) return code;
    return know_stream(stream);
}

int query_stream(void* handle) {
    Stream* stream = stream_at(handle);
    if (const int code = check_synchronisation(stream)) return code;
    if (const int code = query_queue(stream, queued_operations(stream))) return code;
    return know_stream(stream);
}

int synchronize_device() {
    if (const int code = check_capture_allows("device synchronisation")) return code;
    if (const int code = wait_for_queues_of_device()) return code;
    Lock lock(mutex());
    for (Stream* stream : streams())
        if (stream->device == current_device()) know(stream->known);
    return kSuccess;
}

int begin_work(void* handle, const char* name, bool is_queued) {
    Stream* stream = stream_at(handle);
    if (stream->device != current_device())
        return fault(kInvalidHandle, "%s on a stream of device %d while device %d is current", name, stream->device,
                     current_device());
    if (stream->is_default && is_strict() && is_busy(current_torch_stream(stream->device)))
        return fault(kInvalidHandle, "%s on the default stream of device %d, which does not wait for torch's current "
                     "stream", name, stream->device);
    if (!stream->capture && !is_queued)
        if (const int code = wait_for_queue(stream)) return code;
    Lock lock(mutex());
    join_default_stream(stream);
    join(&stream->known, host());
    tick(&stream->known, stream->id);
    return kSuccess;
}

int note_accesses(void* handle, const std::vector<Access>& accesses) {
    if (!is_strict()) return kSuccess;
    const std::string place = python_caller();
    Lock lock(mutex());
    Stream* stream = stream_at(handle);
    if (stream->capture) {
        stream->capture->accesses.insert(stream->capture->accesses.end(), accesses.begin(), accesses.end());
        return kSuccess;
    }
    for (const Access& access : accesses) {
        if (const int code = note_access(access, stream->id, stream->known, place)) return code;
        close_to_host(access, stream->id, stream->known.at(stream->id), place);
    }
    return kSuccess;
}

int enqueue(void* handle, std::function<int()> operation) {
    Stream* stream = stream_at(handle);
    if (stream->capture) {
        record_operation(handle, std::move(operation));
        return kSuccess;
    }
    std::lock_guard<std::mutex> lock(stream->queue_mutex);
    stream->queue.push_back(std::move(operation));
    stream->queued++;
    if (!stream->has_worker) std::thread(work_off, stream).detach();
    stream->has_worker = true;
    stream->queue_changed.notify_all();
    return kSuccess;
}

void* make_event(unsigned) { return new Event{current_device()}; }

// Kept, as streams are.
void drop_event(void*) {}

int record_event(void* handle, void* stream_handle) {
    Stream* stream = stream_at(stream_handle);
    const auto queued = queued_operations(stream);
    Lock lock(mutex());
    auto* event = static_cast<Event*>(handle);
    if (event->device != stream->device)
        return fault(kInvalidHandle, "event of device %d recorded on a stream of device %d", event->device,
                     stream->device);
    event->is_recorded = true;
    event->milliseconds = now_milliseconds();
    event->capture_id = stream->capture ? stream->capture->id : 0;
    event->stream = stream;
    event->queued = queued;
    join_default_stream(stream);
    event->known = stream->known;
    return kSuccess;
}

namespace {

int check_synchronisation(Event* event) {
    Lock lock(mutex());
    Graph* graph = active_capture(event->capture_id);
    if (graph) return break_capture(graph, "synchronisation of an event of the captured stream");
    return check_capture_allows("event synchronisation");
}

int know_event(Event* event) {
    Lock lock(mutex());
    know(event->known);
    return kSuccess;
}

}  // namespace

int synchronize_event(void* handle) {
    auto* event = static_cast<Event*>(handle);
    if (const int code = check_synchronisation(event)) return code;
    if (!event->is_recorded) return kSuccess;
    if (const int code = wait_for_queue(event->stream, event->queued)) return code;
    return know_event(event);
}

int query_event(void* handle) {
    auto* event = static_cast<Event*>(handle);
    if (const int code = check_synchronisation(event)) return code;
    if (!event->is_recorded) return kSuccess;
    if (const int code = query_queue(event->stream, event->queued)) return code;
    return know_event(event);
}

int elapsed_milliseconds(void* begin, void* end, float* milliseconds) {
    const auto* first = static_cast<Event*>(begin);
    const auto* last = static_cast<Event*>(end);
    if (!first->is_recorded || !last->is_recorded)
        return fault(kInvalidHandle, "elapsed time of an event that was not recorded");
    *milliseconds = static_cast<float>(last->milliseconds - first->milliseconds);
    return kSuccess;
}

int wait_for_event(void* handle, void* event_handle) {
    Stream* stream = stream_at(handle);
    auto* event = static_cast<Event*>(event_handle);
    {
        Lock lock(mutex());
        Graph* graph = active_capture(event->capture_id);
        // A stream that waits for a captured one joins its capture.
        if (graph && !stream->capture) {
            stream->capture = graph;
            graph->streams.insert(stream);
        }
        if (!event->is_recorded || stream->capture) return kSuccess;
    }
    if (const int code = wait_for_queue(event->stream, event->queued)) return code;
    Lock lock(mutex());
    join(&stream->known, event->known);
    return kSuccess;
}

int begin_capture(void* handle, int mode) {
    Lock lock(mutex());
    if (reinterpret_cast<uintptr_t>(handle) <= 1) return fault(kCaptureForbids, "capture of the default stream");
    Stream* stream = stream_at(handle);
    if (stream->capture) return fault(kCaptureForbids, "a second capture of a stream");
    stream->capture = new Graph{next_id++, mode, syscall(SYS_gettid)};
    stream->capture->streams.insert(stream);
    captures().insert(stream->capture);
    return kSuccess;
}

int end_capture(void* handle, void** graph_handle) {
    Lock lock(mutex());
    Graph* graph = stream_at(handle)->capture;
    *graph_handle = nullptr;
    if (!graph) return fault(kCaptureInvalidated, "end of a capture that was not begun");
    for (Stream* stream : graph->streams) stream->capture = nullptr;
    captures().erase(graph);
    // Operators compute while they are captured, so that later ones find values; a capture on a GPU changes no memory.
    for (auto kept = graph->before.rbegin(); kept != graph->before.rend(); ++kept)
        if (!check_range(kept->first, kept->second.size(), "memory of a capture"))
            memcpy(kept->first, kept->second.data(), kept->second.size());
    graph->before.clear();
    if (graph->is_broken) return fault(kCaptureInvalidated, "the capture ended at an earlier error");
    *graph_handle = graph;
    return kSuccess;
}

bool capture_status(void* handle, unsigned long long* id, void** graph) {
    Lock lock(mutex());
    Graph* capture = stream_at(handle)->capture;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture;
    return capture != nullptr;
}

int exchange_capture_mode(int* mode) {
    std::swap(*mode, thread_mode);
    return kSuccess;
}

void record_operation(void* handle, std::function<int()> operation) {
    Lock lock(mutex());
    Graph* graph = stream_at(handle)->capture;
    if (graph) graph->operations.push_back(std::move(operation));
}

void keep_until_capture_ends(void* handle, const void* address, size_t bytes) {
    Lock lock(mutex());
    Graph* graph = stream_at(handle)->capture;
    if (!graph || bytes == 0) return;
    for (const auto& kept : graph->before)
        if (kept.first == address && kept.second.size() >= bytes) return;
    const auto* first = static_cast<const char*>(address);
    graph->before.emplace_back(const_cast<void*>(address), std::vector<char>(first, first + bytes));
}

int launch_graph(void* graph_handle, void* stream) {
    const auto* graph = static_cast<Graph*>(graph_handle);
    if (const int code = begin_work(stream, "a graph")) return code;
    if (const int code = note_accesses(stream, graph->accesses)) return code;
    for (const auto& operation : graph->operations)
        if (const int code = operation()) return code;
    return kSuccess;
}

size_t graph_size(void* graph) { return static_cast<Graph*>(graph)->operations.size(); }

// An instance shares the operations of its graph, so destroying the graph alone must keep them.
void drop_graph(void* graph) {
    Lock lock(mutex());
    static_cast<Graph*>(graph)->operations.clear();
    static_cast<Graph*>(graph)->accesses.clear();
}

}  // namespace standin
