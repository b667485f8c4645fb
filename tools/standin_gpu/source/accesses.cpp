#include "accesses.h"

#include <algorithm>
#include <mutex>

#include "standin.h"

namespace standin {
namespace {

struct Stamp {
    unsigned long long stream = 0;  // 0: none
    unsigned long long time = 0;
    std::string operation;
    std::string place;
};

struct Piece {
    uintptr_t end;
    Stamp writer;
    std::vector<Stamp> readers;
};

std::mutex& mutex() {
    static auto* value = new std::mutex;
    return *value;
}

// By first address. Pieces do not overlap.
std::map<uintptr_t, Piece>& pieces() {
    static auto* all = new std::map<uintptr_t, Piece>;
    return *all;
}

// Makes the address a border of pieces.
void split(uintptr_t address) {
    auto found = pieces().upper_bound(address);
    if (found == pieces().begin()) return;
    --found;
    if (found->first == address || found->second.end <= address) return;
    pieces().emplace(address, found->second);
    found->second.end = address;
}

bool is_done(const Stamp& stamp, const Clock& known) {
    if (stamp.stream == 0) return true;
    const auto found = known.find(stamp.stream);
    return found != known.end() && found->second >= stamp.time;
}

int missing_wait(const Access& access, unsigned long long stream, const std::string& place, const Stamp& earlier,
                 const char* did) {
    const auto at = [](const std::string& where) { return where.empty() ? where : " at " + where; };
    return fault(kLaunchFailure, "missing wait: %s%s on stream %llu %s %p, which %s%s on stream %llu %s; let the stream "
                 "wait for it", access.operation.c_str(), at(place).c_str(), stream,
                 access.is_write ? "writes" : "reads", access.address, earlier.operation.c_str(),
                 at(earlier.place).c_str(), earlier.stream, did);
}

}  // namespace

void join(Clock* clock, const Clock& other) {
    for (const auto& [stream, time] : other) {
        auto& known = (*clock)[stream];
        known = std::max(known, time);
    }
}

void tick(Clock* clock, unsigned long long stream) { (*clock)[stream]++; }

int note_access(const Access& access, unsigned long long stream, const Clock& known, const std::string& place) {
    if (access.bytes == 0) return kSuccess;
    std::lock_guard<std::mutex> lock(mutex());
    const auto begin = reinterpret_cast<uintptr_t>(access.address);
    const uintptr_t end = begin + access.bytes;
    split(begin);
    split(end);
    const Stamp own{stream, known.at(stream), access.operation, place};
    auto piece = pieces().lower_bound(begin);
    for (; piece != pieces().end() && piece->first < end; ++piece) {
        if (!is_done(piece->second.writer, known))
            return missing_wait(access, stream, place, piece->second.writer, "writes");
        if (!access.is_write) continue;
        for (const Stamp& reader : piece->second.readers)
            if (!is_done(reader, known)) return missing_wait(access, stream, place, reader, "reads");
    }
    piece = pieces().lower_bound(begin);
    if (access.is_write) {
        while (piece != pieces().end() && piece->first < end) piece = pieces().erase(piece);
        pieces()[begin] = Piece{end, own, {}};
        return kSuccess;
    }
    uintptr_t next = begin;
    while (next < end) {
        if (piece == pieces().end() || piece->first > next) {
            const uintptr_t until = piece == pieces().end() ? end : std::min(end, piece->first);
            piece = pieces().emplace(next, Piece{until, {}, {}}).first;
        }
        auto& readers = piece->second.readers;
        const auto same = std::find_if(readers.begin(), readers.end(), [&](const Stamp& s) { return s.stream == stream; });
        if (same == readers.end()) readers.push_back(own);
        else *same = own;
        next = piece->second.end;
        ++piece;
    }
    return kSuccess;
}

void forget_accesses(const void* address, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex());
    const auto begin = reinterpret_cast<uintptr_t>(address);
    split(begin);
    split(begin + bytes);
    auto piece = pieces().lower_bound(begin);
    while (piece != pieces().end() && piece->first < begin + bytes) piece = pieces().erase(piece);
}

}  // namespace standin
