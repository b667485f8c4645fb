// The CUDA runtime: devices, memory, streams, events and graphs, by the documented functions of cuda_runtime_api.h.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "standin.h"

using namespace standin;

extern "C" void* standin_driver_function(const char* name);

namespace standin {
// The error that cudaGetLastError reports and clears.
thread_local int last_error = 0;

cudaError_t result(int code) {
    if (code) last_error = code;
    return static_cast<cudaError_t>(code);
}
}  // namespace standin

static cudaError_t checked_device(int device) {
    if (device >= 0 && device < device_count()) return cudaSuccess;
    return result(fault(kInvalidDevice, "device %d of %d", device, device_count()));
}

static const char* documented_text(int code) {
    switch (code) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidDeviceFunction: return "invalid device function";
        case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
        case cudaErrorLaunchFailure: return "unspecified launch failure";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        case cudaErrorNotSupported: return "operation not supported";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        default: return "CUDA error";
    }
}

extern "C" {

const char* cudaGetErrorString(cudaError_t code) {
    static thread_local char buffer[2200];
    const char* detail = fault_text(code);
    snprintf(buffer, sizeof buffer, *detail ? "%s (stand-in: %s)" : "%s%s", documented_text(code), detail);
    return buffer;
}

const char* cudaGetErrorName(cudaError_t code) { return documented_text(code); }

cudaError_t cudaGetLastError() {
    const int code = last_error;
    last_error = 0;
    return static_cast<cudaError_t>(code);
}

cudaError_t cudaPeekAtLastError() { return static_cast<cudaError_t>(last_error); }

// ---- devices

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 0;
    // CUDA promises that a driver runs all minor versions of its major one.
    if (driver_cuda_version() / 1000 < CUDART_VERSION / 1000)
        return result(fault(kOldDriver, "driver %s", properties().driver_version.c_str()));
    *count = device_count();
    return *count ? cudaSuccess : result(fault(kNoDevice, "0 of %d devices are visible", properties().count));
}

cudaError_t cudaGetDevice(int* device) {
    *device = current_device();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return result(set_device(device)); }
cudaError_t cudaDeviceSynchronize() { return result(synchronize_device()); }

cudaError_t cudaDriverGetVersion(int* version) {
    *version = driver_cuda_version();
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int device) {
    if (const cudaError_t code = checked_device(device)) return code;
    *value = attribute(name, device);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* known, int device) {
    if (const cudaError_t code = checked_device(device)) return code;
    const auto value = [device](cudaDeviceAttr name) { return attribute(name, device); };
    memset(known, 0, sizeof *known);
    snprintf(known->name, sizeof known->name, "%s", properties().name.c_str());
    uuid_of(device, reinterpret_cast<unsigned char*>(known->uuid.bytes));
    known->totalGlobalMem = properties().memory_bytes;
    known->major = properties().major;
    known->minor = properties().minor;
    known->multiProcessorCount = properties().multiprocessors;
    known->l2CacheSize = static_cast<int>(properties().l2_cache_bytes);
    known->sharedMemPerBlock = value(cudaDevAttrMaxSharedMemoryPerBlock);
    known->sharedMemPerBlockOptin = value(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    known->sharedMemPerMultiprocessor = value(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    known->reservedSharedMemPerBlock = value(cudaDevAttrReservedSharedMemoryPerBlock);
    known->regsPerBlock = value(cudaDevAttrMaxRegistersPerBlock);
    known->regsPerMultiprocessor = value(cudaDevAttrMaxRegistersPerMultiprocessor);
    known->warpSize = value(cudaDevAttrWarpSize);
    known->maxThreadsPerBlock = value(cudaDevAttrMaxThreadsPerBlock);
    known->maxThreadsPerMultiProcessor = value(cudaDevAttrMaxThreadsPerMultiProcessor);
    known->maxBlocksPerMultiProcessor = value(cudaDevAttrMaxBlocksPerMultiprocessor);
    known->maxThreadsDim[0] = value(cudaDevAttrMaxBlockDimX);
    known->maxThreadsDim[1] = value(cudaDevAttrMaxBlockDimY);
    known->maxThreadsDim[2] = value(cudaDevAttrMaxBlockDimZ);
    known->maxGridSize[0] = value(cudaDevAttrMaxGridDimX);
    known->maxGridSize[1] = value(cudaDevAttrMaxGridDimY);
    known->maxGridSize[2] = value(cudaDevAttrMaxGridDimZ);
    known->totalConstMem = value(cudaDevAttrTotalConstantMemory);
    known->textureAlignment = value(cudaDevAttrTextureAlignment);
    known->memPitch = value(cudaDevAttrMaxPitch);
    known->pciBusID = value(cudaDevAttrPciBusId);
    known->unifiedAddressing = 1;
    known->canMapHostMemory = 1;
    known->concurrentKernels = 1;
    known->cooperativeLaunch = 1;
    known->streamPrioritiesSupported = 1;
    known->ECCEnabled = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* name, int length, int device) {
    snprintf(name, length, "0000:%02x:00.0", attribute(cudaDevAttrPciBusId, device));
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* is_possible, int device, int peer) {
    *is_possible = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* query) {
    *function = standin_driver_function(name);
    if (query) *query = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : result(fault(kNotFound, "%s is no function of the driver", name));
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- memory

cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
    *unused = free_bytes(current_device());
    *total = properties().memory_bytes;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, size_t bytes) {
    if (const int code = check_capture_allows("cudaMalloc")) return result(code);
    return result(allocate(address, bytes, current_device()));
}

cudaError_t cudaFree(void* address) {
    if (!address) return cudaSuccess;
    if (const int code = check_capture_allows("cudaFree")) return result(code);
    // As CUDA does: work that still uses the memory ends first.
    if (const int code = synchronize_device()) return result(code);
    return result(deallocate(address));
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) { return result(allocate_pinned(address, bytes)); }
cudaError_t cudaMallocHost(void** address, size_t bytes) { return result(allocate_pinned(address, bytes)); }
cudaError_t cudaFreeHost(void* address) { return result(deallocate(address)); }

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) { return result(register_host(address, bytes)); }
cudaError_t cudaHostUnregister(void* address) { return result(unregister_host(address)); }

cudaError_t cudaHostGetDevicePointer(void** device_address, void* address, unsigned) {
    *device_address = address;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* known, const void* address) {
    memset(known, 0, sizeof *known);
    Region region;
    if (!find_region(address, &region) || region.kind == Kind::kReserved) {
        known->type = cudaMemoryTypeUnregistered;
        known->device = -2;
        known->hostPointer = const_cast<void*>(address);
        return cudaSuccess;
    }
    const bool is_device = region.kind == Kind::kDevice;
    known->type = is_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    known->device = is_device ? region.device : current_device();
    known->devicePointer = const_cast<void*>(address);
    known->hostPointer = is_device ? nullptr : const_cast<void*>(address);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
    if (const int code = check_capture_allows("cudaMemcpy")) return result(code);
    if (const int code = copy(target, source, bytes, nullptr)) return result(code);
    return result(synchronize_stream(nullptr));
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return result(copy(target, source, bytes, stream));
}

cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, cudaStream_t stream) {
    return result(copy(target, source, bytes, stream));
}

cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) {
        const int code = copy(static_cast<char*>(target) + row * target_pitch,
                              static_cast<const char*>(source) + row * source_pitch, width, stream);
        if (code) return result(code);
    }
    return cudaSuccess;
}

cudaError_t cudaMemset(void* target, int value, size_t bytes) { return result(fill(target, value, bytes, nullptr)); }

cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
    return result(fill(target, value, bytes, stream));
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
    memset(handle, 0, sizeof *handle);
    return result(export_handle(address, handle));
}

cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
    return result(import_handle(address, &handle));
}

// ---- streams and events

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    *stream = static_cast<cudaStream_t>(make_stream(flags, priority));
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    drop_stream(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return result(synchronize_stream(stream)); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return result(query_stream(stream)); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    return result(wait_for_event(stream, event));
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    *priority = stream_priority(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
    *flags = stream_flags(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
    *id = stream_id(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
    *device = stream_device(stream);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
    const auto operation = [=] {
        function(argument);
        return int{kSuccess};
    };
    return result(enqueue(stream, operation));
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument, unsigned) {
    const auto operation = [=] {
        function(stream, cudaSuccess, argument);
        return int{kSuccess};
    };
    return result(enqueue(stream, operation));
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    *event = static_cast<cudaEvent_t>(make_event(flags));
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    drop_event(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return result(record_event(event, stream)); }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return result(record_event(event, stream));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return result(synchronize_event(event)); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return result(query_event(event)); }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    return result(elapsed_milliseconds(begin, end, milliseconds));
}

// ---- graphs

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    const bool is_active = capture_status(stream, nullptr, nullptr);
    *status = is_active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
    void* captured = nullptr;
    const bool is_active = capture_status(stream, id, &captured);
    *status = is_active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (graph) *graph = static_cast<cudaGraph_t>(captured);
    if (dependencies) *dependencies = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    return result(begin_capture(stream, mode));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    return result(end_capture(stream, reinterpret_cast<void**>(graph)));
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    return result(exchange_capture_mode(reinterpret_cast<int*>(mode)));
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long) {
    *instance = reinterpret_cast<cudaGraphExec_t>(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(instance, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
    return result(launch_graph(instance, stream));
}

cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
    drop_graph(instance);
    return cudaSuccess;
}

// torch asks for the count alone, to warn of an empty graph.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
    if (nodes) return result(fault(kNotSupported, "nodes of a graph are not imitated"));
    *count = graph_size(graph);
    return cudaSuccess;
}

}  // extern "C"
