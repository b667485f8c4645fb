// The driver's functions, without those of virtual memory, under their documented names. The build adds the rest as unknown.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "standin.h"

using namespace standin;

// Written by the build: names of the functions that only report themselves, ended by a null pointer.
extern "C" const char* const standin_unknown_names[];

static CUresult result(int code) { return static_cast<CUresult>(code); }
static void* host(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

static CUresult checked_device(int device) {
    if (device >= 0 && device < device_count()) return CUDA_SUCCESS;
    return result(fault(kInvalidDevice, "device %d of %d", device, device_count()));
}

static bool is_unknown(const char* name) {
    for (const char* const* known = standin_unknown_names; *known; known++)
        if (!strcmp(*known, name)) return true;
    return false;
}

// The newest version of a function that is imitated; else the one that reports its name.
static void* function_named(const char* name) {
    static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    for (const char* suffix : {"_v3", "_v2", ""}) {
        const std::string full = std::string(name) + suffix;
        void* found = is_unknown(full.c_str()) ? nullptr : dlsym(self, full.c_str());
        if (found) return found;
    }
    return dlsym(self, name);
}

static thread_local std::vector<CUcontext> pushed;

extern "C" {

void* standin_driver_function(const char* name) { return function_named(name); }

CUresult cuInit(unsigned) { return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }

CUresult cuDriverGetVersion(int* version) {
    *version = driver_cuda_version();
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
    static thread_local char buffer[640];
    snprintf(buffer, sizeof buffer, "CUDA driver error %d (stand-in: %s)", static_cast<int>(code), fault_text(code));
    *text = buffer;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char** text) { return cuGetErrorString(code, text); }

CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* query) {
    *function = function_named(name);
    if (query) *query = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : result(fault(kNotFound, "%s is no function of the driver", name));
}

CUresult cuDeviceGet(CUdevice* device, int number) {
    *device = number;
    return checked_device(number);
}

CUresult cuDeviceGetCount(int* count) {
    *count = device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice) {
    snprintf(name, length, "%s", properties().name.c_str());
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    uuid_of(device, reinterpret_cast<unsigned char*>(uuid->bytes));
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {
    *bytes = properties().memory_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute name, CUdevice device) {
    if (const CUresult code = checked_device(device)) return code;
    *value = attribute(name, device);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    if (const CUresult code = checked_device(device)) return code;
    *context = static_cast<CUcontext>(context_of(device));
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
    *flags = 0;
    *is_active = 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = static_cast<CUcontext>(context_of(current_device()));
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (!context) return CUDA_SUCCESS;
    const int device = device_of_context(context);
    return device < 0 ? result(fault(201, "unknown context %p", static_cast<void*>(context)))
                      : result(set_device(device));
}

CUresult cuCtxPushCurrent(CUcontext context) {
    pushed.push_back(static_cast<CUcontext>(context_of(current_device())));
    return cuCtxSetCurrent(context);
}

CUresult cuCtxPopCurrent(CUcontext* context) {
    if (pushed.empty()) return result(fault(201, "cuCtxPopCurrent of an empty stack"));
    if (context) cuCtxGetCurrent(context);
    const CUcontext previous = pushed.back();
    pushed.pop_back();
    return cuCtxSetCurrent(previous);
}

CUresult cuCtxGetDevice(CUdevice* device) {
    *device = current_device();
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() { return result(synchronize_device()); }

CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
    if (const int code = check_capture_allows("cuMemAlloc")) return result(code);
    return result(allocate(reinterpret_cast<void**>(address), bytes, current_device()));
}

CUresult cuMemFree(CUdeviceptr address) {
    if (const int code = synchronize_device()) return result(code);
    return result(deallocate(host(address)));
}

CUresult cuMemGetInfo(size_t* unused, size_t* total) {
    *unused = free_bytes(current_device());
    *total = properties().memory_bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD(CUdeviceptr target, const void* source, size_t bytes) {
    if (const int code = copy(host(target), source, bytes, nullptr)) return result(code);
    return result(synchronize_stream(nullptr));
}

CUresult cuMemcpyDtoH(void* target, CUdeviceptr source, size_t bytes) {
    if (const int code = copy(target, host(source), bytes, nullptr)) return result(code);
    return result(synchronize_stream(nullptr));
}

CUresult cuMemcpyDtoD(CUdeviceptr target, CUdeviceptr source, size_t bytes) {
    return result(copy(host(target), host(source), bytes, nullptr));
}

CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
    return result(copy(host(target), host(source), bytes, stream));
}

CUresult cuMemsetD8(CUdeviceptr target, unsigned char value, size_t bytes) {
    return result(fill(host(target), value, bytes, nullptr));
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t bytes, CUstream stream) {
    return result(fill(host(target), value, bytes, stream));
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute name, CUdeviceptr address) {
    Region region;
    if (!find_region(host(address), &region)) return CUDA_ERROR_INVALID_VALUE;
    const bool is_device = region.kind == Kind::kDevice;
    switch (name) {
        case CU_POINTER_ATTRIBUTE_CONTEXT:
            *static_cast<void**>(value) = context_of(is_device ? region.device : 0);
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned*>(value) = is_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *static_cast<int*>(value) = is_device ? region.device : 0;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            *static_cast<CUdeviceptr*>(value) = address;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            *static_cast<CUdeviceptr*>(value) = region.base;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            *static_cast<size_t*>(value) = region.bytes;
            return CUDA_SUCCESS;
        default:
            return result(fault(kNotSupported, "cuPointerGetAttribute of attribute %d", static_cast<int>(name)));
    }
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
    Region region;
    if (!find_region(host(address), &region)) return CUDA_ERROR_INVALID_VALUE;
    if (base) *base = region.base;
    if (bytes) *bytes = region.bytes;
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) { return result(synchronize_stream(stream)); }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    const bool is_active = capture_status(stream, nullptr, nullptr);
    *status = is_active ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

}  // extern "C"
