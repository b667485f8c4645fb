// NVML: what torch, vLLM and megarl ask of it. Structures are those of NVIDIA's reference; its header is in no wheel.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "standin.h"

using namespace standin;

namespace {

constexpr int kNvmlSuccess = 0;
constexpr int kNvmlInvalidArgument = 2;
constexpr int kNvmlNotSupported = 3;

struct PciInfo {
    char legacy_bus_id[16];
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned device_id;
    unsigned subsystem_id;
    char bus_id[32];
};

struct Memory {
    unsigned long long total;
    unsigned long long unused;
    unsigned long long used;
};

struct MemoryV2 {
    unsigned version;
    unsigned long long total;
    unsigned long long reserved;
    unsigned long long unused;
    unsigned long long used;
};

// The first fields, common to all versions of the structure.
struct FabricInfo {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
};

char handles[kMaxDevices];

// NVML numbers all devices: CUDA_VISIBLE_DEVICES does not hold for it.
int number_of(void* handle) { return static_cast<int>(static_cast<char*>(handle) - handles); }
constexpr int kFirstBus = 0x10;

unsigned long long unused_bytes(int number) {
    for (int device = 0; device < device_count(); device++)
        if (physical_index(device) == number) return free_bytes(device);
    return properties().memory_bytes - kContextBytes;
}

}  // namespace

extern "C" {

int nvmlInit_v2() { return kNvmlSuccess; }
int nvmlInitWithFlags(unsigned) { return kNvmlSuccess; }
int nvmlShutdown() { return kNvmlSuccess; }

const char* nvmlErrorString(int code) {
    return code == kNvmlSuccess ? "Success" : code == kNvmlNotSupported ? "Not Supported" : "Invalid Argument";
}

int nvmlSystemGetDriverVersion(char* text, unsigned length) {
    snprintf(text, length, "%s", properties().driver_version.c_str());
    return kNvmlSuccess;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
    *version = driver_cuda_version();
    return kNvmlSuccess;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = static_cast<unsigned>(properties().count);
    return kNvmlSuccess;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned number, void** handle) {
    if (number >= static_cast<unsigned>(properties().count)) return kNvmlInvalidArgument;
    *handle = handles + number;
    return kNvmlSuccess;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** handle) {
    const char* colon = strchr(bus_id, ':');
    if (!colon) return kNvmlInvalidArgument;
    return nvmlDeviceGetHandleByIndex_v2(static_cast<unsigned>(strtol(colon + 1, nullptr, 16) - kFirstBus), handle);
}

int nvmlDeviceGetIndex(void* handle, unsigned* number) {
    *number = static_cast<unsigned>(number_of(handle));
    return kNvmlSuccess;
}

int nvmlDeviceGetName(void*, char* text, unsigned length) {
    snprintf(text, length, "%s", properties().name.c_str());
    return kNvmlSuccess;
}

int nvmlDeviceGetUUID(void* handle, char* text, unsigned length) {
    // The bytes of uuid_of.
    snprintf(text, length, "GPU-7374616e-6469-6e5f-6770-7500000000%02x", number_of(handle));
    return kNvmlSuccess;
}

int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
    *major = properties().major;
    *minor = properties().minor;
    return kNvmlSuccess;
}

int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
    memory->total = properties().memory_bytes;
    memory->unused = unused_bytes(number_of(handle));
    memory->used = memory->total - memory->unused;
    return kNvmlSuccess;
}

int nvmlDeviceGetMemoryInfo_v2(void* handle, MemoryV2* memory) {
    memory->total = properties().memory_bytes;
    memory->reserved = 0;
    memory->unused = unused_bytes(number_of(handle));
    memory->used = memory->total - memory->unused;
    return kNvmlSuccess;
}

int nvmlDeviceGetPciInfo_v3(void* handle, PciInfo* info) {
    memset(info, 0, sizeof *info);
    info->bus = static_cast<unsigned>(kFirstBus + number_of(handle));
    snprintf(info->legacy_bus_id, sizeof info->legacy_bus_id, "0000:%02X:00.0", info->bus);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
    return kNvmlSuccess;
}

// Status 0 is "OK": every pair of devices has NVLink, as in an HGX board.
int nvmlDeviceGetP2PStatus(void*, void*, int, int* status) {
    *status = 0;
    return kNvmlSuccess;
}

int nvmlDeviceGetFieldValues(void*, int, void*) { return kNvmlNotSupported; }

int nvmlDeviceGetMigMode(void*, unsigned* current, unsigned* pending) {
    *current = 0;
    *pending = 0;
    return kNvmlSuccess;
}

int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
    *count = 0;
    return kNvmlSuccess;
}

// torch looks these up with the others and goes on where they are not supported.
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return kNvmlNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, PciInfo*) { return kNvmlNotSupported; }

// torch asks before it reserves addresses for expandable segments. State 0: the device is in no fabric of nodes.
int nvmlDeviceGetGpuFabricInfoV(void*, FabricInfo* info) {
    const unsigned version = info->version;
    memset(info, 0, sizeof *info);
    info->version = version;
    return kNvmlSuccess;
}

}  // extern "C"
