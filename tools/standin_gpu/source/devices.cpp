// Devices of the properties file, and the count of their memory over all processes of a run.
#include <cuda.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <vector>

#include "standin.h"

namespace standin {
namespace {

constexpr int kMaxProcesses = 512;

struct Account {
    int process;
    size_t bytes[kMaxDevices];
};

Properties read_properties() {
    Properties result;
    std::ifstream file(state_folder() + "/properties");
    for (std::string line; std::getline(file, line);) {
        const auto equals = line.find('=');
        if (equals == std::string::npos) continue;
        const std::string key = line.substr(0, equals);
        const std::string value = line.substr(equals + 1);
        if (key == "name") result.name = value;
        if (key == "driver_version") result.driver_version = value;
        if (key == "count") result.count = atoi(value.c_str());
        if (key == "memory_bytes") result.memory_bytes = strtoull(value.c_str(), nullptr, 10);
        if (key == "multiprocessors") result.multiprocessors = atoi(value.c_str());
        if (key == "l2_cache_bytes") result.l2_cache_bytes = strtoull(value.c_str(), nullptr, 10);
        if (key == "compute_capability") sscanf(value.c_str(), "%d.%d", &result.major, &result.minor);
    }
    if (result.count == 0) log_line("STANDIN_GPU_STATE names no run: start the program with tools/standin_gpu/run.py");
    return result;
}

std::string uuid_text(int number) {
    char text[48];
    snprintf(text, sizeof text, "GPU-7374616e-6469-6e5f-6770-7500000000%02x", number);
    return text;
}

// The number of an entry of CUDA_VISIBLE_DEVICES: a number, or the beginning of one device's UUID. -1: no such device.
int device_named(const std::string& entry, int count) {
    if (!entry.empty() && entry.find_first_not_of("0123456789") == std::string::npos) {
        const int number = atoi(entry.c_str());
        return number < count ? number : -1;
    }
    int found = -1;
    for (int number = 0; number < count; number++) {
        if (entry.size() < 5 || uuid_text(number).compare(0, entry.size(), entry)) continue;
        if (found >= 0) return -1;
        found = number;
    }
    return found;
}

// As with CUDA, the first entry of CUDA_VISIBLE_DEVICES that names no device ends the list.
std::vector<int> read_visible() {
    std::vector<int> result;
    const int count = properties().count;
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int device = 0; device < count; device++) result.push_back(device);
        return result;
    }
    std::istringstream entries(text);
    for (std::string entry; std::getline(entries, entry, ',');) {
        entry.erase(std::remove(entry.begin(), entry.end(), ' '), entry.end());
        const int device = device_named(entry, count);
        if (device < 0) break;
        // A device that is named twice makes CUDA see none.
        if (std::find(result.begin(), result.end(), device) != result.end()) return {};
        result.push_back(device);
    }
    return result;
}

const std::vector<int>& visible() {
    static const auto* devices = new std::vector<int>(read_visible());
    return *devices;
}

Account* accounts() {
    static Account* table = [] {
        const size_t bytes = sizeof(Account) * kMaxProcesses;
        const int file = open((state_folder() + "/memory").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file < 0 || ftruncate(file, bytes)) {
            log_line("%s/memory cannot be written", state_folder().c_str());
            abort();
        }
        void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        return static_cast<Account*>(address);
    }();
    return table;
}

bool is_alive(int process) { return process != 0 && (kill(process, 0) == 0 || errno != ESRCH); }

// A fork gets an account of its own. That of a dead process is free again: the driver frees its memory, too.
Account* own_account() {
    static Account* account = nullptr;
    static int owner = 0;
    const int process = getpid();
    if (account && owner == process) return account;
    for (int i = 0; i < kMaxProcesses; i++) {
        Account* candidate = accounts() + i;
        const int old = __atomic_load_n(&candidate->process, __ATOMIC_SEQ_CST);
        if (old != process && is_alive(old)) continue;
        int expected = old;
        if (!__atomic_compare_exchange_n(&candidate->process, &expected, process, false, __ATOMIC_SEQ_CST,
                                         __ATOMIC_SEQ_CST))
            continue;
        memset(candidate->bytes, 0, sizeof candidate->bytes);
        account = candidate;
        owner = process;
        return account;
    }
    log_line("more than %d processes use the devices", kMaxProcesses);
    abort();
}

size_t used_bytes(int device) {
    size_t total = kContextBytes;
    for (int i = 0; i < kMaxProcesses; i++)
        if (is_alive(accounts()[i].process)) total += accounts()[i].bytes[physical_index(device)];
    return total;
}

thread_local int current = 0;
char contexts[kMaxDevices];

}  // namespace

const std::string& state_folder() {
    static const auto* folder = new std::string(getenv("STANDIN_GPU_STATE") ? getenv("STANDIN_GPU_STATE") : "");
    return *folder;
}

const Properties& properties() {
    static const auto* read = new Properties(read_properties());
    return *read;
}

int device_count() { return static_cast<int>(visible().size()); }
int current_device() { return current; }
int physical_index(int device) { return visible()[device]; }
void* context_of(int device) { return contexts + device; }

int set_device(int device) {
    if (device < 0 || device >= device_count())
        return fault(kInvalidDevice, "device %d of %d", device, device_count());
    current = device;
    return kSuccess;
}

int device_of_context(const void* context) {
    const auto offset = static_cast<const char*>(context) - contexts;
    return offset >= 0 && offset < device_count() ? static_cast<int>(offset) : -1;
}

void uuid_of(int device, unsigned char bytes[16]) {
    memset(bytes, 0, 16);
    memcpy(bytes, "standin_gpu", 11);
    bytes[15] = static_cast<unsigned char>(physical_index(device));
}

// The newest CUDA of each driver branch. Source: NVIDIA's CUDA Toolkit release notes, table of driver versions.
int driver_cuda_version() {
    static const struct {
        int branch;
        int version;
    } kNewest[] = {{580, 13000}, {575, 12090}, {570, 12080}, {560, 12060}, {555, 12050}, {550, 12040},
                   {545, 12030}, {535, 12020}, {530, 12010}, {525, 12000}, {450, 11000}};
    const int branch = atoi(properties().driver_version.c_str());
    for (const auto& entry : kNewest)
        if (branch >= entry.branch) return entry.version;
    return 10000;
}

bool take_bytes(int device, size_t bytes) {
    Account* account = own_account();
    size_t* counter = &account->bytes[physical_index(device)];
    // Counted first, then compared: of two processes at the limit both may fail, never both succeed.
    __atomic_add_fetch(counter, bytes, __ATOMIC_SEQ_CST);
    if (used_bytes(device) <= properties().memory_bytes) return true;
    __atomic_sub_fetch(counter, bytes, __ATOMIC_SEQ_CST);
    return false;
}

void give_bytes(int device, size_t bytes) {
    __atomic_sub_fetch(&own_account()->bytes[physical_index(device)], bytes, __ATOMIC_SEQ_CST);
}

size_t free_bytes(int device) {
    const size_t used = used_bytes(device);
    return used < properties().memory_bytes ? properties().memory_bytes - used : 0;
}

// Values of compute capability 9.0 in the CUDA programming guide; one list for both libraries, whose enums agree.
int attribute(int attribute, int device) {
    const Properties& known = properties();
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
            return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
            return 64;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
            return 2147483647;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
            return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
            return 48 << 10;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
            return 227 << 10;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
            return 228 << 10;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
            return 1 << 10;
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
            return 64 << 10;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
            return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
            return 2048;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
            return 512;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
            return known.multiprocessors;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
            return static_cast<int>(known.l2_cache_bytes);
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
            return known.major;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
            return known.minor;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
            return 0x10 + physical_index(device);
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
            return 1;
        default:
            // What is not imitated (memory pools, multicast, fabric handles, RDMA) is absent.
            return 0;
    }
}

}  // namespace standin
