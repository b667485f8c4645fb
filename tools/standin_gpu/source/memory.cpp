// Device memory: pages of the host that only their owner's addresses reach. Freed and sleeping memory has no pages.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "accesses.h"
#include "pinned.h"
#include "regions.h"

namespace standin {

std::recursive_mutex& memory_mutex() {
    static auto* mutex = new std::recursive_mutex;
    return *mutex;
}

std::map<uintptr_t, Region>& regions() {
    static auto* all = new std::map<uintptr_t, Region>;
    return *all;
}

std::map<uintptr_t, Region>::iterator region_at(const void* address) {
    const auto wanted = reinterpret_cast<uintptr_t>(address);
    auto found = regions().upper_bound(wanted);
    if (found == regions().begin()) return regions().end();
    --found;
    return wanted < found->first + found->second.bytes ? found : regions().end();
}

char* reserve_addresses(size_t bytes) {
    // A page without access follows each allocation, so that a host loop past its end faults.
    const size_t total = bytes + kGranularity + 4096;
    void* start = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    const auto first = reinterpret_cast<uintptr_t>(start);
    return reinterpret_cast<char*>((first + kGranularity - 1) & ~(kGranularity - 1));
}

void remove_pages(void* address, size_t bytes) {
    mmap(address, bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

int make_memory_file(size_t bytes) {
    const int file = static_cast<int>(syscall(SYS_memfd_create, "standin_gpu", 1u));
    if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0) return file;
    if (file >= 0) close(file);
    return -1;
}

namespace {

size_t rounded(size_t bytes) {
    const size_t unit = bytes > kGranularity ? kGranularity : 4096;
    return (bytes + unit - 1) / unit * unit;
}

int place(void** address, size_t bytes, Kind kind, int device, int file) {
    char* start = reserve_addresses(bytes);
    const int sharing = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    const int flags = MAP_FIXED | MAP_NORESERVE | sharing;
    if (!start || mmap(start, bytes, PROT_READ | PROT_WRITE, flags, file, 0) == MAP_FAILED)
        return fault(kOutOfMemory, "the host has no addresses for %zu bytes", bytes);
    const auto base = reinterpret_cast<uintptr_t>(start);
    regions()[base] = Region{base, bytes, kind, device, file, true, 0};
    *address = start;
    return kSuccess;
}

}  // namespace

int allocate(void** address, size_t bytes, int device) {
    *address = nullptr;
    if (bytes == 0) return kSuccess;
    MemoryLock lock(memory_mutex());
    const size_t size = rounded(bytes);
    if (!take_bytes(device, size))
        return fault(kOutOfMemory, "device %d has %zu bytes free, %zu were asked for", device, free_bytes(device),
                     size);
    const int file = make_memory_file(size);
    const int code = file < 0 ? int{kOutOfMemory} : place(address, size, Kind::kDevice, device, file);
    if (code) give_bytes(device, size);
    return code;
}

int allocate_pinned(void** address, size_t bytes) {
    *address = nullptr;
    if (bytes == 0) return kSuccess;
    MemoryLock lock(memory_mutex());
    return place(address, rounded(bytes), Kind::kPinned, -1, -1);
}

int deallocate(void* address) {
    if (!address) return kSuccess;
    MemoryLock lock(memory_mutex());
    const auto found = regions().find(reinterpret_cast<uintptr_t>(address));
    const bool is_own = found != regions().end() &&
                        (found->second.kind == Kind::kDevice || found->second.kind == Kind::kPinned) &&
                        found->second.physical == 0;
    if (!is_own) return fault(kInvalidValue, "free of %p, which is not the start of an allocation", address);
    const Region region = found->second;
    forget_accesses(address, region.bytes);
    forget_pinned(address, region.bytes);
    // The addresses stay reserved: no later allocation gets them, and a late use faults.
    remove_pages(address, region.bytes);
    if (region.file >= 0) close(region.file);
    if (region.kind == Kind::kDevice) give_bytes(region.device, region.bytes);
    found->second.is_mapped = false;
    found->second.kind = Kind::kReserved;
    found->second.file = -1;
    return kSuccess;
}

int register_host(void* address, size_t bytes) {
    MemoryLock lock(memory_mutex());
    if (region_at(address) != regions().end()) return fault(712, "%p is registered already", address);
    const auto base = reinterpret_cast<uintptr_t>(address);
    regions()[base] = Region{base, bytes, Kind::kRegistered, -1, -1, true, 0};
    return kSuccess;
}

int unregister_host(void* address) {
    MemoryLock lock(memory_mutex());
    const auto found = regions().find(reinterpret_cast<uintptr_t>(address));
    if (found == regions().end() || found->second.kind != Kind::kRegistered)
        return fault(713, "%p is not registered", address);
    forget_pinned(address, found->second.bytes);
    regions().erase(found);
    return kSuccess;
}

bool find_region(const void* address, Region* region) {
    MemoryLock lock(memory_mutex());
    const auto found = region_at(address);
    if (found == regions().end()) return false;
    *region = found->second;
    return true;
}

int check_range(const void* address, size_t bytes, const char* role) {
    MemoryLock lock(memory_mutex());
    auto found = region_at(address);
    if (found == regions().end()) return kSuccess;
    const auto end = reinterpret_cast<uintptr_t>(address) + bytes;
    // Several mappings may follow one another: those of one reservation.
    for (uintptr_t next = reinterpret_cast<uintptr_t>(address); next < end;) {
        found = region_at(reinterpret_cast<const void*>(next));
        if (found == regions().end())
            return fault(kIllegalAddress, "%s %p + %zu reaches past its allocation", role, address, bytes);
        if (!found->second.is_mapped)
            return fault(kIllegalAddress, "%s %p + %zu lies in memory that is freed or asleep", role, address, bytes);
        next = found->first + found->second.bytes;
    }
    return kSuccess;
}

int copy_now(void* target, const void* source, size_t bytes) {
    if (bytes == 0) return kSuccess;
    if (const int code = check_range(target, bytes, "copy to")) return code;
    if (const int code = check_range(source, bytes, "copy from")) return code;
    move_bytes(target, source, bytes);
    return kSuccess;
}

namespace {

// Host memory that a copy may still read or write after the call returns.
bool is_pinned(const void* address) {
    Region region;
    return find_region(address, &region) && (region.kind == Kind::kPinned || region.kind == Kind::kRegistered);
}

bool is_known(const void* address) {
    Region region;
    return find_region(address, &region);
}

// Pageable host memory has no history: the copy is done when the call returns.
std::vector<Access> accesses_of_copy(void* target, const void* source, size_t bytes) {
    std::vector<Access> result;
    if (is_known(source)) result.push_back({source, bytes, false, "a copy"});
    if (is_known(target)) result.push_back({target, bytes, true, "a copy"});
    return result;
}

}  // namespace

int copy(void* target, const void* source, size_t bytes, void* stream) {
    if (bytes == 0) return kSuccess;
    const bool is_captured = capture_status(stream, nullptr, nullptr);
    if (is_captured && (!is_known(target) || !is_known(source)))
        return fault(kCaptureForbids, "copy of pageable host memory while a stream is captured");
    if (const int code = check_range(target, bytes, "copy to")) return code;
    if (const int code = check_range(source, bytes, "copy from")) return code;
    const bool is_late = is_strict() && (is_pinned(target) || is_pinned(source));
    if (const int code = begin_work(stream, "a copy", is_late)) return code;
    if (const int code = note_accesses(stream, accesses_of_copy(target, source, bytes))) return code;
    const auto operation = [=] { return copy_now(target, source, bytes); };
    if (is_captured) keep_until_capture_ends(stream, target, bytes);
    if (is_captured || is_late) enqueue(stream, operation);
    return is_late && !is_captured ? int{kSuccess} : operation();
}

int fill(void* target, int value, size_t bytes, void* stream) {
    if (bytes == 0) return kSuccess;
    if (const int code = check_range(target, bytes, "fill of")) return code;
    if (const int code = begin_work(stream, "a fill")) return code;
    if (const int code = note_accesses(stream, {{target, bytes, true, "a fill"}})) return code;
    const auto operation = [=] {
        if (const int code = check_range(target, bytes, "fill of")) return code;
        memset(target, value, bytes);
        return int{kSuccess};
    };
    if (capture_status(stream, nullptr, nullptr)) {
        keep_until_capture_ends(stream, target, bytes);
        enqueue(stream, operation);
    }
    return operation();
}

// A handle names the process and its file; the other process opens the same pages.
int export_handle(void* address, void* handle) {
    MemoryLock lock(memory_mutex());
    const auto found = regions().find(reinterpret_cast<uintptr_t>(address));
    if (found == regions().end() || found->second.file < 0)
        return fault(kInvalidValue, "IPC handle of %p, which is not the start of a device allocation", address);
    const Region& region = found->second;
    snprintf(static_cast<char*>(handle), 64, "%d %d %zu", getpid(), region.file, region.bytes);
    return kSuccess;
}

int import_handle(void** address, const void* handle) {
    int process = 0;
    int number = 0;
    size_t bytes = 0;
    if (sscanf(static_cast<const char*>(handle), "%d %d %zu", &process, &number, &bytes) != 3)
        return fault(kInvalidValue, "not an IPC handle");
    if (process == getpid()) return fault(201, "an IPC handle is opened by its own process");
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, number);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return fault(201, "the memory of process %d is gone", process);
    MemoryLock lock(memory_mutex());
    // Shared pages count for their owner alone.
    return place(address, bytes, Kind::kDevice, current_device(), file);
}

}  // namespace standin
