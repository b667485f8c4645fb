// NCCL between the processes of a run: each message is a file in the run's folder. A call returns once its data is there.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#include "reductions.h"
#include "standin.h"

using namespace standin;

struct ncclComm {
    std::string id;
    int size;
    int rank;
    int device;
    long next_collective = 0;
    int next_split = 0;
    std::map<int, long> sent;
    std::map<int, long> received;
    std::atomic<bool> is_aborted{false};
};

namespace {

using Bytes = std::vector<char>;

thread_local std::string last_error;

ncclResult_t refuse(ncclResult_t code, const std::string& text) {
    last_error = "stand-in: " + text;
    log_line("%s", text.c_str());
    return code;
}

std::string file_of(const ncclComm* comm, const std::string& message) {
    return state_folder() + "/nccl-" + comm->id + "-" + message;
}

// Renamed when whole: a reader sees all of a message or none.
ncclResult_t write_message(const std::string& file, const void* data, size_t bytes) {
    const std::string partial = file + ".partial";
    FILE* stream = fopen(partial.c_str(), "w");
    const bool is_written = stream && fwrite(data, 1, bytes, stream) == bytes;
    if (stream) fclose(stream);
    if (!is_written || rename(partial.c_str(), file.c_str()))
        return refuse(ncclSystemError, file + " cannot be written: is shared memory full?");
    return ncclSuccess;
}

ncclResult_t read_message(const ncclComm* comm, const std::string& file, int peer, Bytes* data) {
    int descriptor = -1;
    // Polled, at first often: tests send thousands of small messages.
    for (useconds_t pause = 20; (descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC)) < 0;) {
        if (comm->is_aborted) return refuse(ncclInternalError, "the communicator was aborted");
        usleep(pause);
        if (pause < 2000) pause *= 2;
    }
    struct stat status;
    fstat(descriptor, &status);
    const size_t expected = data->size();
    const bool is_right = static_cast<size_t>(status.st_size) == expected;
    size_t done = 0;
    while (is_right && done < expected) {
        const ssize_t count = read(descriptor, data->data() + done, expected - done);
        if (count <= 0) break;
        done += static_cast<size_t>(count);
    }
    close(descriptor);
    if (is_right && done == expected) return ncclSuccess;
    return refuse(ncclInvalidUsage, "rank " + std::to_string(comm->rank) + " expects " + std::to_string(expected) +
                                        " bytes, rank " + std::to_string(peer) + " sent " +
                                        std::to_string(status.st_size));
}

// Every rank writes its bytes and reads those of all. `sizes` [ranks] are the lengths, in bytes.
ncclResult_t exchange(ncclComm* comm, const void* data, const std::vector<size_t>& sizes, std::vector<Bytes>* all) {
    const long number = comm->next_collective++;
    const auto name = [&](long step, int rank) {
        return file_of(comm, std::to_string(step) + "-" + std::to_string(rank));
    };
    const size_t own_bytes = sizes[static_cast<size_t>(comm->rank)];
    if (const auto code = write_message(name(number, comm->rank), data, own_bytes)) return code;
    all->resize(static_cast<size_t>(comm->size));
    for (int rank = 0; rank < comm->size; rank++) {
        Bytes& bytes = (*all)[static_cast<size_t>(rank)];
        bytes.resize(sizes[static_cast<size_t>(rank)]);
        if (const auto code = read_message(comm, name(number, rank), rank, &bytes)) return code;
    }
    // All ranks that wrote this message have read the one before.
    if (number > 0) unlink(name(number - 1, comm->rank).c_str());
    return ncclSuccess;
}

ncclResult_t exchange_equal(ncclComm* comm, const void* data, size_t bytes, std::vector<Bytes>* all) {
    return exchange(comm, data, std::vector<size_t>(static_cast<size_t>(comm->size), bytes), all);
}

ncclResult_t make_comm(ncclComm_t* comm, int size, const std::string& id, int rank) {
    auto* made = new ncclComm{id, size, rank, current_device()};
    *comm = made;
    char one = 0;
    std::vector<Bytes> all;
    return exchange_equal(made, &one, 1, &all);
}

// Collectives and sends of a group, in order: sends first, so that no two ranks wait for each other.
struct Pending {
    bool is_send;
    std::function<ncclResult_t()> work;
};
thread_local int group_depth = 0;
thread_local std::vector<Pending> pending;

ncclResult_t check_memory(const char* call, const ncclComm* comm, const void* address, size_t bytes) {
    Region region;
    if (bytes == 0) return ncclSuccess;
    if (!find_region(address, &region))
        return refuse(ncclInvalidArgument, std::string(call) + " with memory of the host");
    if (check_range(address, bytes, call)) return refuse(ncclUnhandledCudaError, fault_text(kIllegalAddress));
    if (region.kind == Kind::kDevice && region.device != comm->device)
        return refuse(ncclInvalidArgument, std::string(call) + " of a communicator on device " +
                                               std::to_string(comm->device) + " with memory of device " +
                                               std::to_string(region.device));
    return ncclSuccess;
}

ncclResult_t submit(const char* call, ncclComm* comm, cudaStream_t stream, std::function<ncclResult_t()> work,
                    bool is_send = false) {
    if (comm->is_aborted) return refuse(ncclInvalidUsage, std::string(call) + " of an aborted communicator");
    if (stream_device(stream) != comm->device)
        return refuse(ncclInvalidArgument, std::string(call) + " of a communicator on device " +
                                               std::to_string(comm->device) + " on a stream of device " +
                                               std::to_string(stream_device(stream)));
    if (capture_status(stream, nullptr, nullptr)) record_operation(stream, [work] { work(); });
    if (group_depth == 0) return work();
    pending.push_back({is_send, std::move(work)});
    return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t code) {
    switch (code) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error";
        case ncclSystemError: return "unhandled system error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        default: return "internal error";
    }
}

const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> number{0};
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%d-%d-%ld", getpid(), number++, now.tv_nsec);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
    return make_comm(comm, size, id.internal, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
    return make_comm(comm, size, id.internal, rank);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t*) {
    const int own[3] = {color, key, comm->rank};
    std::vector<Bytes> all;
    if (const auto code = exchange_equal(comm, own, sizeof own, &all)) return code;
    const int number = comm->next_split++;
    *made = nullptr;
    if (color < 0) return ncclSuccess;
    int size = 0;
    int rank = 0;
    for (const Bytes& bytes : all) {
        int other[3];
        memcpy(other, bytes.data(), sizeof other);
        if (other[0] != color) continue;
        size++;
        if (other[1] < key || (other[1] == key && other[2] < comm->rank)) rank++;
    }
    return make_comm(made, size, comm->id + "s" + std::to_string(number) + "c" + std::to_string(color), rank);
}

// Kept, some bytes each: torch's watchdog may still ask for its error.
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclCommAbort(comm); }
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->is_aborted = true;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* code) {
    *code = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) {
    *size = comm->size;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
    *device = comm->device;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (--group_depth > 0) return ncclSuccess;
    const std::vector<Pending> calls = std::move(pending);
    pending.clear();
    for (const bool sends : {true, false})
        for (const Pending& call : calls)
            if (call.is_send == sends)
                if (const auto code = call.work()) return code;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    if (const auto code = check_memory("ncclAllReduce", comm, source, bytes)) return code;
    if (const auto code = check_memory("ncclAllReduce", comm, target, bytes)) return code;
    return submit("ncclAllReduce", comm, stream, [=] {
        std::vector<Bytes> all;
        if (const auto code = exchange_equal(comm, source, bytes, &all)) return code;
        return reduce(all, 0, count, type, operation, target);
    });
}

ncclResult_t ncclReduce(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                        int root, ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    if (const auto code = check_memory("ncclReduce", comm, source, bytes)) return code;
    return submit("ncclReduce", comm, stream, [=] {
        std::vector<Bytes> all;
        if (const auto code = exchange_equal(comm, source, bytes, &all)) return code;
        return comm->rank == root ? reduce(all, 0, count, type, operation, target) : ncclSuccess;
    });
}

ncclResult_t ncclReduceScatter(const void* source, void* target, size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    const auto size = static_cast<size_t>(comm->size);
    if (const auto code = check_memory("ncclReduceScatter", comm, source, bytes * size)) return code;
    if (const auto code = check_memory("ncclReduceScatter", comm, target, bytes)) return code;
    return submit("ncclReduceScatter", comm, stream, [=] {
        std::vector<Bytes> all;
        if (const auto code = exchange_equal(comm, source, bytes * size, &all)) return code;
        return reduce(all, bytes * static_cast<size_t>(comm->rank), count, type, operation, target);
    });
}

ncclResult_t ncclBroadcast(const void* source, void* target, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    if (const auto code = check_memory("ncclBroadcast", comm, target, bytes)) return code;
    return submit("ncclBroadcast", comm, stream, [=] {
        std::vector<Bytes> all;
        std::vector<size_t> sizes(static_cast<size_t>(comm->size), 0);
        sizes[static_cast<size_t>(root)] = bytes;
        if (const auto code = exchange(comm, source, sizes, &all)) return code;
        memcpy(target, all[static_cast<size_t>(root)].data(), bytes);
        return ncclSuccess;
    });
}

ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(const void* source, void* target, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    if (const auto code = check_memory("ncclAllGather", comm, source, bytes)) return code;
    if (const auto code = check_memory("ncclAllGather", comm, target, bytes * static_cast<size_t>(comm->size)))
        return code;
    return submit("ncclAllGather", comm, stream, [=] {
        std::vector<Bytes> all;
        if (const auto code = exchange_equal(comm, source, bytes, &all)) return code;
        for (size_t rank = 0; rank < all.size(); rank++)
            memcpy(static_cast<char*>(target) + rank * bytes, all[rank].data(), bytes);
        return ncclSuccess;
    });
}

ncclResult_t ncclSend(const void* source, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    if (const auto code = check_memory("ncclSend", comm, source, bytes)) return code;
    const auto work = [=] {
        const std::string name = "from" + std::to_string(comm->rank) + "to" + std::to_string(peer) + "-";
        return write_message(file_of(comm, name + std::to_string(comm->sent[peer]++)), source, bytes);
    };
    return submit("ncclSend", comm, stream, work, true);
}

ncclResult_t ncclRecv(void* target, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    if (const auto code = check_memory("ncclRecv", comm, target, bytes)) return code;
    return submit("ncclRecv", comm, stream, [=] {
        const std::string name = "from" + std::to_string(peer) + "to" + std::to_string(comm->rank) + "-";
        const std::string file = file_of(comm, name + std::to_string(comm->received[peer]++));
        Bytes data(bytes);
        if (const auto code = read_message(comm, file, peer, &data)) return code;
        unlink(file.c_str());
        memcpy(target, data.data(), bytes);
        return ncclSuccess;
    });
}

}  // extern "C"
