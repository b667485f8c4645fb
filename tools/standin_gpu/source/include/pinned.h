// Pinned memory that a stream still writes, closed to the host until it has waited.
#pragma once
#include <string>

#include "accesses.h"

namespace standin {

// Work that writes pinned memory was submitted, as operation `time` of the stream. Other memory is left alone.
void close_to_host(const Access& access, unsigned long long stream, unsigned long long time, const std::string& place);
// The host has waited for the operations of this clock.
void open_to_host(const Clock& known);
// Memory that is freed or no longer registered.
void forget_pinned(const void* address, size_t bytes);
// Copies as memmove does, also from and to closed memory.
void move_bytes(void* target, const void* source, size_t bytes);
// This thread does the work of a stream: its callbacks may read what the stream wrote.
void mark_working_thread();

}  // namespace standin
