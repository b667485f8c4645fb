// Streams, events and graphs. Work is done when it is submitted: streams have an identity and rules, but no delay.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "standin.h"

namespace standin {
namespace {

// Values of cudaStreamCaptureMode.
constexpr int kGlobal = 0;
constexpr int kThreadLocal = 1;
constexpr int kRelaxed = 2;

struct Graph;

struct Stream {
    int device;
    unsigned flags;
    int priority;
    unsigned long long id;
    Graph* capture = nullptr;
};

struct Event {
    int device;
    bool is_recorded = false;
    double milliseconds = 0;
    unsigned long long capture_id = 0;  // 0: recorded outside a capture
};

struct Graph {
    unsigned long long id;
    int mode;
    long thread;
    bool is_broken = false;
    std::vector<std::function<void()>> operations;
    std::set<Stream*> streams;
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

unsigned long long next_id = 1;
thread_local int thread_mode = kGlobal;

Stream* stream_at(void* handle) {
    static Stream* defaults[kMaxDevices];
    // Handles 0, 1 and 2 are the default streams of the current device.
    if (reinterpret_cast<uintptr_t>(handle) > 2) return static_cast<Stream*>(handle);
    Lock lock(mutex());
    Stream*& stream = defaults[current_device()];
    if (!stream) stream = new Stream{current_device(), 0, 0, next_id++};
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

}  // namespace

void* make_stream(unsigned flags, int priority) {
    Lock lock(mutex());
    return new Stream{current_device(), flags, priority, next_id++};
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
        if (graph->mode == kGlobal || (graph->mode == kThreadLocal && is_own)) return break_capture(graph, call);
    }
    return kSuccess;
}

int synchronize_stream(void* handle) {
    Lock lock(mutex());
    Stream* stream = stream_at(handle);
    if (stream->capture) return break_capture(stream->capture, "synchronisation of the captured stream");
    return check_capture_allows("stream synchronisation");
}

int synchronize_device() { return check_capture_allows("device synchronisation"); }

int check_launch(void* handle, const char* name) {
    Stream* stream = stream_at(handle);
    if (stream->device == current_device()) return kSuccess;
    return fault(kInvalidHandle, "%s on a stream of device %d while device %d is current", name, stream->device,
                 current_device());
}

void* make_event(unsigned) { return new Event{current_device()}; }

// Kept, as streams are.
void drop_event(void*) {}

int record_event(void* handle, void* stream_handle) {
    Lock lock(mutex());
    auto* event = static_cast<Event*>(handle);
    Stream* stream = stream_at(stream_handle);
    if (event->device != stream->device)
        return fault(kInvalidHandle, "event of device %d recorded on a stream of device %d", event->device,
                     stream->device);
    event->is_recorded = true;
    event->milliseconds = now_milliseconds();
    event->capture_id = stream->capture ? stream->capture->id : 0;
    return kSuccess;
}

int synchronize_event(void* handle) {
    Lock lock(mutex());
    Graph* graph = active_capture(static_cast<Event*>(handle)->capture_id);
    if (graph) return break_capture(graph, "synchronisation of an event of the captured stream");
    return check_capture_allows("event synchronisation");
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
    Lock lock(mutex());
    Stream* stream = stream_at(handle);
    Graph* graph = active_capture(static_cast<Event*>(event_handle)->capture_id);
    // A stream that waits for a captured one joins its capture.
    if (!graph || stream->capture) return kSuccess;
    stream->capture = graph;
    graph->streams.insert(stream);
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

void record_operation(void* handle, std::function<void()> operation) {
    Lock lock(mutex());
    Graph* graph = stream_at(handle)->capture;
    if (graph) graph->operations.push_back(std::move(operation));
}

int launch_graph(void* graph, void* stream) {
    if (const int code = check_launch(stream, "a graph")) return code;
    for (const auto& operation : static_cast<Graph*>(graph)->operations) operation();
    return kSuccess;
}

// An instance shares the operations of its graph, so destroying the graph alone must keep them.
void drop_graph(void* graph) {
    Lock lock(mutex());
    static_cast<Graph*>(graph)->operations.clear();
}

}  // namespace standin
