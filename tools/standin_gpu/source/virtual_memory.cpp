// Virtual memory management of the driver: physical memory is a file, a mapping shows it at reserved addresses.
#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include "accesses.h"
#include "regions.h"

namespace standin {
namespace {

struct Physical {
    int file;
    size_t bytes;
    int device;
    int uses;
};

std::map<uint64_t, Physical>& physicals() {
    static auto* all = new std::map<uint64_t, Physical>;
    return *all;
}

uint64_t next_handle = 1;

void drop_use(uint64_t handle) {
    Physical& physical = physicals().at(handle);
    if (--physical.uses > 0) return;
    close(physical.file);
    give_bytes(physical.device, physical.bytes);
    physicals().erase(handle);
}

Region reserved(uintptr_t base, size_t bytes) { return Region{base, bytes, Kind::kReserved, 0, -1, false, 0}; }

}  // namespace
}  // namespace standin

using namespace standin;

static CUresult result(int code) { return static_cast<CUresult>(code); }

extern "C" {

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *bytes = kGranularity;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* property,
                     unsigned long long) {
    MemoryLock lock(memory_mutex());
    const int device = property->location.id;
    if (bytes == 0 || bytes % kGranularity)
        return result(fault(kInvalidValue, "cuMemCreate of %zu bytes: not a multiple of the granularity", bytes));
    if (device < 0 || device >= device_count())
        return result(fault(kInvalidDevice, "cuMemCreate on device %d", device));
    if (!take_bytes(device, bytes))
        return result(fault(kOutOfMemory, "device %d has %zu bytes free, %zu were asked for", device,
                            free_bytes(device), bytes));
    const int file = make_memory_file(bytes);
    if (file < 0) {
        give_bytes(device, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = next_handle++;
    physicals()[*handle] = Physical{file, bytes, device, 1};
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    MemoryLock lock(memory_mutex());
    if (!physicals().count(handle)) return result(fault(kInvalidValue, "cuMemRelease of an unknown handle"));
    drop_use(handle);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    MemoryLock lock(memory_mutex());
    char* start = reserve_addresses(bytes);
    if (!start) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<CUdeviceptr>(start);
    regions()[*address] = reserved(*address, bytes);
    return CUDA_SUCCESS;
}

// The addresses stay reserved without pages, so that a late use is an error.
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    MemoryLock lock(memory_mutex());
    for (auto i = regions().lower_bound(address); i != regions().end() && i->first < address + bytes; ++i)
        if (i->second.is_mapped) return result(fault(kInvalidValue, "cuMemAddressFree of mapped addresses"));
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
    MemoryLock lock(memory_mutex());
    const auto physical = physicals().find(handle);
    if (physical == physicals().end()) return result(fault(kInvalidValue, "cuMemMap of an unknown handle"));
    const auto found = region_at(reinterpret_cast<void*>(address));
    if (found == regions().end()) return result(fault(kInvalidValue, "cuMemMap at addresses without reservation"));
    if (found->second.is_mapped) return result(fault(kInvalidValue, "cuMemMap at mapped addresses"));
    const uintptr_t base = found->first;
    const uintptr_t end = base + found->second.bytes;
    if (address + bytes > end) return result(fault(kInvalidValue, "cuMemMap past the end of the reservation"));
    // Without access until cuMemSetAccess, as with the driver.
    if (mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_FIXED | MAP_SHARED | MAP_NORESERVE,
             physical->second.file, static_cast<off_t>(offset)) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    regions().erase(found);
    if (base < address) regions()[base] = reserved(base, address - base);
    if (address + bytes < end) regions()[address + bytes] = reserved(address + bytes, end - address - bytes);
    regions()[address] = Region{address, bytes, Kind::kDevice, physical->second.device, -1, true, handle};
    physical->second.uses++;
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t) {
    MemoryLock lock(memory_mutex());
    int protection = PROT_NONE;
    if (access->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) protection |= PROT_READ;
    if (access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) protection |= PROT_WRITE;
    const int failed = mprotect(reinterpret_cast<void*>(address), bytes, protection);
    return failed ? result(fault(kInvalidValue, "cuMemSetAccess of addresses without a mapping")) : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    MemoryLock lock(memory_mutex());
    if (const int code = check_capture_allows("cuMemUnmap")) return result(code);
    for (auto i = regions().lower_bound(address); i != regions().end() && i->first < address + bytes; ++i) {
        Region& region = i->second;
        if (!region.is_mapped || !region.physical)
            return result(fault(kInvalidValue, "cuMemUnmap of unmapped addresses"));
        drop_use(region.physical);
        region = reserved(region.base, region.bytes);
    }
    forget_accesses(reinterpret_cast<void*>(address), bytes);
    remove_pages(reinterpret_cast<void*>(address), bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
    MemoryLock lock(memory_mutex());
    const auto found = region_at(address);
    if (found == regions().end() || !found->second.physical)
        return result(fault(kInvalidValue, "%p is not a mapping of physical memory", address));
    *handle = found->second.physical;
    physicals().at(*handle).uses++;
    return CUDA_SUCCESS;
}

}  // extern "C"
