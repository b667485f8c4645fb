// NCCL between the processes of a run: each message is a file in the run's folder. The thread of the stream carries a
// call out (streams.cpp), so that its caller goes on meanwhile.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "accesses.h"
#include "reductions.h"
#include "standin.h"
#include "waits.h"

using namespace standin;

struct ncclComm {
    std::string id;
    int size;
    int rank;
    int device;
    Group group;
    long next_collective = 0;
    int next_split = 0;
    std::map<int, long> sent;
    std::map<int, long> received;
    std::set<cudaStream_t> streams;
    std::atomic<bool> is_aborted{false};
};

namespace {

using Bytes = std::vector<char>;

thread_local std::string last_error;

ncclResult_t refuse(ncclResult_t code, const std::string& text) {
    last_error = text;
    log_line("%s", text.c_str());
    return code;
}

constexpr int kNone = -1;

// Precedes the data of each message: what its sender called, compared by the receiver.
struct Call {
    char name[24];
    int type;
    int operation;  // kNone: the call reduces nothing
    int root;       // kNone: the call has no root
    size_t count;
    char place[200];  // file and line of Python

    bool is_same(const Call& other) const {
        return !strcmp(name, other.name) && type == other.type && operation == other.operation && root == other.root &&
               count == other.count;
    }

    std::string text() const {
        std::string result = name + (" of " + std::to_string(count)) + " " + type_name(static_cast<ncclDataType_t>(type));
        if (operation != kNone) result += ", reduction " + std::to_string(operation);
        if (root != kNone) result += ", root " + std::to_string(root);
        if (*place) result += std::string(" at ") + place;
        return result;
    }
};

Call call_of(const char* name, size_t count, ncclDataType_t type, int operation = kNone, int root = kNone) {
    Call call{};
    snprintf(call.name, sizeof call.name, "%s", name);
    snprintf(call.place, sizeof call.place, "%s", python_caller().c_str());
    call.type = type;
    call.operation = operation;
    call.root = root;
    call.count = count;
    return call;
}

// torch gives a collective ten minutes by default; a call of the stand-in fails after the same time, and names the peer.
double limit_seconds() {
    static const char* text = getenv("STANDIN_GPU_WAIT_SECONDS");
    return text ? atof(text) : 600;
}
constexpr double kReportSeconds = 30;
// Other ranks see a wait that takes longer.
constexpr double kSlotSeconds = 0.2;
constexpr double kOrderSeconds = 3;

std::string file_of(const ncclComm* comm, const std::string& message) {
    return state_folder() + "/nccl-" + comm->id + "-" + message;
}

// Renamed when whole: a reader sees all of a message or none.
ncclResult_t write_message(const std::string& file, const Call& call, const void* data, size_t bytes) {
    const std::string partial = file + ".partial";
    FILE* stream = fopen(partial.c_str(), "w");
    const bool is_written = stream && fwrite(&call, sizeof call, 1, stream) == 1 &&
                            (bytes == 0 || fwrite(data, bytes, 1, stream) == 1);
    const bool is_closed = stream && fclose(stream) == 0;
    if (!is_written || !is_closed || rename(partial.c_str(), file.c_str()))
        return refuse(ncclSystemError, file + " cannot be written: is shared memory full?");
    return ncclSuccess;
}

double seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Waits for the file of a message and opens it.
ncclResult_t open_message(const ncclComm* comm, const std::string& file, const Call& own, int peer, int* descriptor) {
    const auto waiting = [&] {
        return "rank " + std::to_string(comm->rank) + " waits for rank " + std::to_string(peer) + " in " + own.text();
    };
    const auto member = static_cast<size_t>(peer);
    // The members are known once the communicator is made.
    const std::vector<int>& members = comm->group.processes;
    const int process = member < members.size() ? members[member] : kNoProcess;
    const double begin = seconds();
    bool is_reported = false;
    std::optional<WaitSlot> slot;
    double next_look = std::min(kOrderSeconds, limit_seconds() / 2);
    // Polled, at first often: tests send thousands of small messages.
    for (useconds_t pause = 20; (*descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC)) < 0;) {
        if (comm->is_aborted) return refuse(ncclInternalError, "the communicator was aborted");
        const double waited = seconds() - begin;
        if (waited > kSlotSeconds && !slot) slot.emplace(comm->group, own.text(), true, process);
        if (waited > next_look) {
            const std::string fault = order_fault(comm->group, own.text(), process);
            if (!fault.empty()) {
                // Other ranks of the circle shall still see this call.
                usleep(static_cast<useconds_t>(kOrderSeconds * 1e6));
                return refuse(ncclInvalidUsage, fault);
            }
            next_look += 1;
        }
        if (waited > limit_seconds())
            return refuse(ncclRemoteError, waiting() + ", for more than " + std::to_string(int(limit_seconds())) + " s");
        if (waited > kReportSeconds && !is_reported) {
            log_line("%s, for more than %d s", waiting().c_str(), static_cast<int>(kReportSeconds));
            is_reported = true;
        }
        usleep(pause);
        if (pause < 2000) pause *= 2;
    }
    return ncclSuccess;
}

bool read_all(int descriptor, void* target, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t count = read(descriptor, static_cast<char*>(target) + done, bytes - done);
        if (count <= 0) return false;
        done += static_cast<size_t>(count);
    }
    return true;
}

// Reads `data->size()` bytes of a message. `are_equal`: sender and receiver make the same call, as in a collective.
ncclResult_t read_message(const ncclComm* comm, const std::string& file, const Call& own, int peer, bool are_equal,
                          Bytes* data) {
    int descriptor = -1;
    if (const auto code = open_message(comm, file, own, peer, &descriptor)) return code;
    Call other{};
    const bool has_call = read_all(descriptor, &other, sizeof other);
    const bool is_right = has_call && (are_equal ? own.is_same(other) : own.count == other.count && own.type == other.type);
    const bool is_whole = is_right && read_all(descriptor, data->data(), data->size());
    close(descriptor);
    if (is_whole) return ncclSuccess;
    return refuse(ncclInvalidUsage, "rank " + std::to_string(comm->rank) + " calls " + own.text() + ", rank " +
                                        std::to_string(peer) + " calls " + other.text());
}

// Every rank writes its bytes and reads those of all. `sizes` [ranks] are the lengths, in bytes.
ncclResult_t exchange(ncclComm* comm, const Call& call, const void* data, const std::vector<size_t>& sizes,
                      std::vector<Bytes>* all) {
    const long number = comm->next_collective++;
    const auto name = [&](long step, int rank) {
        return file_of(comm, std::to_string(step) + "-" + std::to_string(rank));
    };
    const size_t own_bytes = sizes[static_cast<size_t>(comm->rank)];
    if (const auto code = write_message(name(number, comm->rank), call, data, own_bytes)) return code;
    all->resize(static_cast<size_t>(comm->size));
    for (int rank = 0; rank < comm->size; rank++) {
        Bytes& bytes = (*all)[static_cast<size_t>(rank)];
        bytes.resize(sizes[static_cast<size_t>(rank)]);
        if (const auto code = read_message(comm, name(number, rank), call, rank, true, &bytes)) return code;
    }
    // All ranks that wrote this message have read the one before.
    if (number > 0) unlink(name(number - 1, comm->rank).c_str());
    return ncclSuccess;
}

ncclResult_t exchange_equal(ncclComm* comm, const Call& call, const void* data, size_t bytes, std::vector<Bytes>* all) {
    return exchange(comm, call, data, std::vector<size_t>(static_cast<size_t>(comm->size), bytes), all);
}

ncclResult_t make_comm(ncclComm_t* comm, int size, const std::string& id, int rank) {
    auto* made = new ncclComm{id, size, rank, current_device(), current_group()};
    // Those of the group's other communicators are in another order.
    made->group.processes.clear();
    *comm = made;
    const int numbers[] = {own_rank(), getpid()};
    const Call call = call_of("ncclCommInitRank", static_cast<size_t>(size), ncclInt8);
    std::vector<Bytes> all;
    if (const auto code = exchange_equal(made, call, numbers, sizeof numbers, &all)) return code;
    // vLLM's communicators belong to no group of torch.
    if (made->group.name.empty()) made->group.name = "the communicator made at " + std::string(call.place);
    made->group.ranks.clear();
    made->group.processes.clear();
    for (const Bytes& of_member : all) {
        int received[2];
        memcpy(received, of_member.data(), sizeof received);
        made->group.ranks.push_back(received[0]);
        made->group.processes.push_back(received[1]);
    }
    note_processes(made->group);
    return ncclSuccess;
}

// Memory that a call reads or writes.
struct Operand {
    const void* address;
    size_t bytes;
    bool is_write;
};

ncclResult_t check_memory(const char* call, const ncclComm* comm, const Operand& operand) {
    Region region;
    if (operand.bytes == 0) return ncclSuccess;
    if (!find_region(operand.address, &region))
        return refuse(ncclInvalidArgument, std::string(call) + " with memory of the host");
    if (check_range(operand.address, operand.bytes, call))
        return refuse(ncclUnhandledCudaError, fault_text(kIllegalAddress));
    if (region.kind == Kind::kDevice && region.device != comm->device)
        return refuse(ncclInvalidArgument, std::string(call) + " of a communicator on device " +
                                               std::to_string(comm->device) + " with memory of device " +
                                               std::to_string(region.device));
    return ncclSuccess;
}

// A call of a group. Sends come first when the group runs, so that no two ranks wait for each other.
struct Pending {
    cudaStream_t stream;
    bool is_send;
    std::function<ncclResult_t()> work;
};
thread_local int group_depth = 0;
thread_local std::vector<Pending> pending;

// Queues calls in the one stream of theirs.
ncclResult_t enqueue_calls(cudaStream_t stream, const std::vector<Pending>& calls) {
    enqueue(stream, [calls] {
        for (const bool sends : {true, false})
            for (const Pending& call : calls)
                if (call.is_send == sends)
                    if (call.work()) return fault(kLaunchFailure, "%s", last_error.c_str());
        return int{kSuccess};
    });
    return ncclSuccess;
}

ncclResult_t submit(const char* call, ncclComm* comm, cudaStream_t stream, const std::vector<Operand>& operands,
                    const std::function<ncclResult_t()>& work, bool is_send = false) {
    if (comm->is_aborted) return refuse(ncclInvalidUsage, std::string(call) + " of an aborted communicator");
    // torch makes some communicators together with their group, outside a collective.
    if (!current_group().name.empty() && comm->group.name != current_group().name) {
        comm->group.name = current_group().name;
        note_processes(comm->group);
    }
    if (stream_device(stream) != comm->device)
        return refuse(ncclInvalidArgument, std::string(call) + " of a communicator on device " +
                                               std::to_string(comm->device) + " on a stream of device " +
                                               std::to_string(stream_device(stream)));
    std::vector<Access> accesses;
    for (const Operand& operand : operands) {
        if (const auto code = check_memory(call, comm, operand)) return code;
        accesses.push_back({operand.address, operand.bytes, operand.is_write, call});
    }
    int code = begin_work(stream, call, true);
    if (!code) code = note_accesses(stream, accesses);
    if (code) return refuse(ncclUnhandledCudaError, fault_text(code));
    comm->streams.insert(stream);
    const std::string name = call;
    // Checked again when it runs: memory may have been freed or put to sleep meanwhile.
    const auto checked = [=] {
        for (const Operand& operand : operands)
            if (const auto wrong = check_memory(name.c_str(), comm, operand)) return wrong;
        return work();
    };
    if (group_depth == 0) return enqueue_calls(stream, {{stream, is_send, checked}});
    pending.push_back({stream, is_send, checked});
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
        case ncclRemoteError: return "remote process exited or there was a network error";
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
    // Not numbered among the collectives: some of them may still be queued.
    const int number = comm->next_split++;
    ncclComm talk{comm->id + "s" + std::to_string(number), comm->size, comm->rank, comm->device};
    const Call call = call_of("ncclCommSplit", 3, ncclInt32);
    if (const auto code = exchange_equal(&talk, call, own, sizeof own, &all)) return code;
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

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    for (const cudaStream_t stream : comm->streams)
        if (const int code = synchronize_stream(stream)) return refuse(ncclUnhandledCudaError, fault_text(code));
    return ncclSuccess;
}

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
    std::vector<Pending> calls = std::move(pending);
    pending.clear();
    while (!calls.empty()) {
        const cudaStream_t stream = calls.front().stream;
        std::vector<Pending> own;
        std::vector<Pending> others;
        for (const Pending& call : calls) (call.stream == stream ? own : others).push_back(call);
        if (const auto code = enqueue_calls(stream, own)) return code;
        calls = std::move(others);
    }
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    const Call call = call_of("ncclAllReduce", count, type, operation);
    return submit(call.name, comm, stream, {{source, bytes, false}, {target, bytes, true}}, [=] {
        std::vector<Bytes> all;
        if (const auto code = exchange_equal(comm, call, source, bytes, &all)) return code;
        return reduce(all, 0, count, type, operation, target);
    });
}

ncclResult_t ncclReduce(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                        int root, ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    const Call call = call_of("ncclReduce", count, type, operation, root);
    std::vector<Operand> operands{{source, bytes, false}};
    if (comm->rank == root) operands.push_back({target, bytes, true});
    return submit(call.name, comm, stream, operands, [=] {
        std::vector<Bytes> all;
        if (const auto code = exchange_equal(comm, call, source, bytes, &all)) return code;
        return comm->rank == root ? reduce(all, 0, count, type, operation, target) : ncclSuccess;
    });
}

ncclResult_t ncclReduceScatter(const void* source, void* target, size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    const size_t whole = bytes * static_cast<size_t>(comm->size);
    const Call call = call_of("ncclReduceScatter", count, type, operation);
    return submit(call.name, comm, stream, {{source, whole, false}, {target, bytes, true}}, [=] {
        std::vector<Bytes> all;
        if (const auto code = exchange_equal(comm, call, source, whole, &all)) return code;
        return reduce(all, bytes * static_cast<size_t>(comm->rank), count, type, operation, target);
    });
}

ncclResult_t ncclBroadcast(const void* source, void* target, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    const Call call = call_of("ncclBroadcast", count, type, kNone, root);
    std::vector<Operand> operands{{target, bytes, true}};
    if (comm->rank == root) operands.push_back({source, bytes, false});
    return submit(call.name, comm, stream, operands, [=] {
        std::vector<Bytes> all;
        std::vector<size_t> sizes(static_cast<size_t>(comm->size), 0);
        sizes[static_cast<size_t>(root)] = bytes;
        if (const auto code = exchange(comm, call, source, sizes, &all)) return code;
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
    const size_t whole = bytes * static_cast<size_t>(comm->size);
    const Call call = call_of("ncclAllGather", count, type);
    return submit(call.name, comm, stream, {{source, bytes, false}, {target, whole, true}}, [=] {
        std::vector<Bytes> all;
        if (const auto code = exchange_equal(comm, call, source, bytes, &all)) return code;
        for (size_t rank = 0; rank < all.size(); rank++)
            memcpy(static_cast<char*>(target) + rank * bytes, all[rank].data(), bytes);
        return ncclSuccess;
    });
}

ncclResult_t ncclAlltoAll(const void* source, void* target, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    const size_t whole = bytes * static_cast<size_t>(comm->size);
    const Call call = call_of("ncclAlltoAll", count, type);
    return submit(call.name, comm, stream, {{source, whole, false}, {target, whole, true}}, [=] {
        std::vector<Bytes> all;
        if (const auto code = exchange_equal(comm, call, source, whole, &all)) return code;
        for (size_t rank = 0; rank < all.size(); rank++)
            memcpy(static_cast<char*>(target) + rank * bytes,
                   all[rank].data() + static_cast<size_t>(comm->rank) * bytes, bytes);
        return ncclSuccess;
    });
}

ncclResult_t ncclGather(const void* source, void* target, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    const Call call = call_of("ncclGather", count, type, kNone, root);
    std::vector<Operand> operands{{source, bytes, false}};
    if (comm->rank == root) operands.push_back({target, bytes * static_cast<size_t>(comm->size), true});
    return submit(call.name, comm, stream, operands, [=] {
        std::vector<Bytes> all;
        if (const auto code = exchange_equal(comm, call, source, bytes, &all)) return code;
        for (size_t rank = 0; comm->rank == root && rank < all.size(); rank++)
            memcpy(static_cast<char*>(target) + rank * bytes, all[rank].data(), bytes);
        return ncclSuccess;
    });
}

ncclResult_t ncclScatter(const void* source, void* target, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    const size_t whole = bytes * static_cast<size_t>(comm->size);
    const Call call = call_of("ncclScatter", count, type, kNone, root);
    std::vector<Operand> operands{{target, bytes, true}};
    if (comm->rank == root) operands.push_back({source, whole, false});
    return submit(call.name, comm, stream, operands, [=] {
        std::vector<Bytes> all;
        std::vector<size_t> sizes(static_cast<size_t>(comm->size), 0);
        sizes[static_cast<size_t>(root)] = whole;
        if (const auto code = exchange(comm, call, source, sizes, &all)) return code;
        memcpy(target, all[static_cast<size_t>(root)].data() + static_cast<size_t>(comm->rank) * bytes, bytes);
        return ncclSuccess;
    });
}

ncclResult_t ncclSend(const void* source, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    const Call call = call_of("ncclSend", count, type);
    const auto work = [=] {
        const std::string name = "from" + std::to_string(comm->rank) + "to" + std::to_string(peer) + "-";
        return write_message(file_of(comm, name + std::to_string(comm->sent[peer]++)), call, source, bytes);
    };
    return submit(call.name, comm, stream, {{source, bytes, false}}, work, true);
}

ncclResult_t ncclRecv(void* target, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    const size_t bytes = count * element_bytes(type);
    const Call call = call_of("ncclRecv", count, type);
    return submit(call.name, comm, stream, {{target, bytes, true}}, [=] {
        const std::string name = "from" + std::to_string(peer) + "to" + std::to_string(comm->rank) + "-";
        const std::string file = file_of(comm, name + std::to_string(comm->received[peer]++));
        Bytes data(bytes);
        if (const auto code = read_message(comm, file, call, peer, false, &data)) return code;
        unlink(file.c_str());
        if (bytes) memcpy(target, data.data(), bytes);
        return ncclSuccess;
    });
}

}  // extern "C"
