// Pinned memory that a stream still writes. Its pages are closed to the host until the host has waited for the work, so
// that an early read ends the program with a name, where a GPU would give old values.
#include "pinned.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "standin.h"

namespace standin {
namespace {

constexpr uintptr_t kPage = 4096;

struct Pending {
    uintptr_t begin;
    uintptr_t end;
    unsigned long long stream;
    unsigned long long time;
    std::string text;  // the work that writes
};

std::recursive_mutex& mutex() {
    static auto* value = new std::recursive_mutex;
    return *value;
}

using Lock = std::lock_guard<std::recursive_mutex>;

std::vector<Pending>& pendings() {
    static auto* all = new std::vector<Pending>;
    return *all;
}

thread_local bool is_working = false;
struct sigaction earlier_action;

uintptr_t page_of(uintptr_t address) { return address / kPage * kPage; }
uintptr_t page_after(uintptr_t address) { return page_of(address + kPage - 1); }

void set_access(uintptr_t begin, uintptr_t end, int access) {
    if (begin < end) mprotect(reinterpret_cast<void*>(begin), end - begin, access);
}

void open_pages(uintptr_t begin, uintptr_t end) { set_access(page_of(begin), page_after(end), PROT_READ | PROT_WRITE); }

// Gives the pages of a range the access that the pending work leaves. The caller holds the mutex.
void protect(uintptr_t begin, uintptr_t end) {
    open_pages(begin, end);
    for (const Pending& work : pendings())
        set_access(std::max(page_of(begin), page_of(work.begin)), std::min(page_after(end), page_after(work.end)),
                   PROT_NONE);
}

bool overlaps(const Pending& work, uintptr_t begin, uintptr_t end) { return work.begin < end && begin < work.end; }

void report(uintptr_t address, bool is_write, const std::string& text) {
    char line[1024];
    const int length =
        snprintf(line, sizeof line, "standin_gpu[%d]: early %s: the host %s pinned memory at %p, which %s; let the host "
                 "wait for the stream or an event first\n", getpid(), is_write ? "write" : "read",
                 is_write ? "writes" : "reads", reinterpret_cast<void*>(address), text.c_str());
    const auto bytes = static_cast<size_t>(std::min<int>(length, sizeof line - 1));
    if (write(STDERR_FILENO, line, bytes) < 0) return;
}

// A closed page may hold other bytes, and a stream's own callbacks may read it: then the page is opened for good.
void on_fault(int, siginfo_t* information, void* context) {
    const auto address = reinterpret_cast<uintptr_t>(information->si_addr);
    bool is_closed = false;
    const Pending* read = nullptr;
    {
        // Work holds the mutex only while pages are open to it, so this thread does not have it.
        Lock lock(mutex());
        for (const Pending& work : pendings()) {
            if (page_of(work.begin) <= address && address < page_after(work.end)) is_closed = true;
            if (work.begin <= address && address < work.end) read = &work;
        }
        if (is_closed && (!read || is_working)) {
            open_pages(address, address + 1);
            return;
        }
        // Bit 1 of the processor's error code.
        const bool is_write = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
        if (read) report(address, is_write, read->text);
    }
    // The instruction runs again, and faults into the handler before this one: Python's prints the stack.
    sigaction(SIGSEGV, &earlier_action, nullptr);
}

void watch_faults() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &earlier_action);
    });
}

}  // namespace

void close_to_host(const Access& access, unsigned long long stream, unsigned long long time, const std::string& place) {
    Region region;
    const bool is_pinned = find_region(access.address, &region) &&
                           (region.kind == Kind::kPinned || region.kind == Kind::kRegistered);
    if (!access.is_write || !access.bytes || !is_pinned) return;
    watch_faults();
    auto begin = reinterpret_cast<uintptr_t>(access.address);
    auto end = begin + access.bytes;
    // Registered memory may share its first and last page with other memory, which system calls use.
    begin = std::max(begin, page_after(region.base));
    end = std::min(end, page_of(region.base + region.bytes));
    if (begin >= end) return;
    const std::string where = place.empty() ? "" : " at " + place;
    Lock lock(mutex());
    pendings().push_back({begin, end, stream, time,
                          access.operation + where + " on stream " + std::to_string(stream) + " writes"});
    protect(begin, end);
}

void open_to_host(const Clock& known) {
    Lock lock(mutex());
    const auto is_done = [&](const Pending& work) {
        const auto found = known.find(work.stream);
        return found != known.end() && found->second >= work.time;
    };
    const auto first = std::stable_partition(pendings().begin(), pendings().end(),
                                             [&](const Pending& work) { return !is_done(work); });
    const std::vector<Pending> done(first, pendings().end());
    pendings().erase(first, pendings().end());
    for (const Pending& work : done) protect(work.begin, work.end);
}

void forget_pinned(const void* address, size_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(address);
    Lock lock(mutex());
    const auto first = std::remove_if(pendings().begin(), pendings().end(),
                                      [=](const Pending& work) { return overlaps(work, begin, begin + bytes); });
    if (first == pendings().end()) return;
    pendings().erase(first, pendings().end());
    open_pages(begin, begin + bytes);
}

void move_bytes(void* target, const void* source, size_t bytes) {
    Lock lock(mutex());
    std::vector<std::pair<uintptr_t, uintptr_t>> closed;
    for (const void* address : {static_cast<const void*>(target), source}) {
        const auto begin = reinterpret_cast<uintptr_t>(address);
        for (const Pending& work : pendings())
            if (page_of(work.begin) < page_after(begin + bytes) && page_of(begin) < page_after(work.end))
                closed.emplace_back(work.begin, work.end);
    }
    for (const auto& [begin, end] : closed) open_pages(begin, end);
    memmove(target, source, bytes);
    for (const auto& [begin, end] : closed) protect(begin, end);
}

void mark_working_thread() { is_working = true; }

}  // namespace standin
