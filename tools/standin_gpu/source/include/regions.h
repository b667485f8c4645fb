// The table of allocations, for memory.cpp and virtual_memory.cpp.
#pragma once
#include <map>
#include <mutex>

#include "standin.h"

namespace standin {

using MemoryLock = std::lock_guard<std::recursive_mutex>;

// Alignment of addresses and size of physical pages, as cuMemGetAllocationGranularity reports on Hopper.
constexpr size_t kGranularity = size_t{2} << 20;

std::recursive_mutex& memory_mutex();
std::map<uintptr_t, Region>& regions();
std::map<uintptr_t, Region>::iterator region_at(const void* address);
char* reserve_addresses(size_t bytes);
void remove_pages(void* address, size_t bytes);
int make_memory_file(size_t bytes);

}  // namespace standin
