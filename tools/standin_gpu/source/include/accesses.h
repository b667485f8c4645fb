// Which operation of which stream used a range of memory last, and which operations another one has waited for.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace standin {

// By number of a stream: its newest operation that is known to be done before.
using Clock = std::map<unsigned long long, unsigned long long>;

void join(Clock* clock, const Clock& other);
void tick(Clock* clock, unsigned long long stream);

struct Access {
    const void* address;
    size_t bytes;
    bool is_write;
    std::string operation;
};

// Fails where another stream's operation on the memory is not known to be done. `place` is a file and line.
int note_access(const Access& access, unsigned long long stream, const Clock& known, const std::string& place);
// Memory that was freed or unmapped: a later allocation at its addresses has no history.
void forget_accesses(const void* address, size_t bytes);

}  // namespace standin
