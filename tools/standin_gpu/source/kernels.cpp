// Kernels of compiled libraries: registered with their names, never run. A launch fails and names the kernel.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "standin.h"

using namespace standin;

namespace standin {
cudaError_t result(int code);
}

namespace {

struct Configuration {
    dim3 grid;
    dim3 block;
    size_t shared_bytes;
    void* stream;
};

thread_local std::vector<Configuration> configurations;

std::mutex& mutex() {
    static auto* value = new std::mutex;
    return *value;
}

std::unordered_map<const void*, std::string>& kernels() {
    static auto* names = new std::unordered_map<const void*, std::string>;
    return *names;
}

std::string readable(const void* function) {
    std::lock_guard<std::mutex> lock(mutex());
    const auto found = kernels().find(function);
    if (found == kernels().end()) return "an unregistered kernel";
    int status = 0;
    char* plain = abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, &status);
    const std::string name = plain ? plain : found->second;
    free(plain);
    return name;
}

cudaError_t refuse(const void* function) {
    const std::string name = readable(function).substr(0, 300);
    // vLLM's compiled models have kernels of their own.
    const char* remedy = "an engine has fewer kernels with rollout.vllm.enforce_eager=true";
    log_line("kernel %s is not imitated; %s", name.c_str(), remedy);
    return result(fault(kInvalidFunction, "kernel %s is not imitated; %s", name.c_str(), remedy));
}

}  // namespace

extern "C" {

// The names with two underscores are those that the compiler's generated code calls.
void** __cudaRegisterFatBinary(void*) { return new void*(nullptr); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
    std::lock_guard<std::mutex> lock(mutex());
    kernels()[function] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
    configurations.push_back({grid, block, shared_bytes, stream});
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
    const Configuration last = configurations.back();
    configurations.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared_bytes = last.shared_bytes;
    memcpy(stream, &last.stream, sizeof last.stream);
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return refuse(kernel); }

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
    return refuse(function);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) { return refuse(function); }

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
    return refuse(function);
}

}  // extern "C"
