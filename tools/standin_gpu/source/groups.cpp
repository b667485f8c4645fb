// Collectives of torch, before their backend gets them: gloo is refused device memory, and the group's name is kept for
// the errors of NCCL's calls.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "standin.h"
#include "waits.h"

namespace {

using c10::IValue;
using torch::jit::Stack;

// The device of the first CUDA tensor in an argument, or -1. Outputs of some collectives are lists of lists.
int cuda_device_of(const IValue& value) {
    if (value.isTensor()) return value.toTensor().defined() && value.toTensor().is_cuda() ? value.toTensor().get_device() : -1;
    if (!value.isList()) return -1;
    for (const IValue& element : value.toListRef())
        if (const int device = cuda_device_of(element); device >= 0) return device;
    return -1;
}

std::string name_of(const c10d::ProcessGroup& group) {
    const std::string& description = group.getGroupDesc();
    const bool is_described = !description.empty() && description != "undefined";
    return (is_described ? description + ", " : "") + "group " + group.getGroupName();
}

// Gloo copies most tensors of a device to the host, but reads those of its coalesced all-gather there: a GPU's process
// ends by a signal (pytorch issue 152645). No collective of gloo belongs on a device.
void check_backend(const std::string& operation, c10d::ProcessGroup& group, int device) {
    std::string backend;
    try {
        backend = group.getBackend(c10::DeviceType::CUDA)->getBackendName();
    } catch (const c10::Error&) {
        return;  // none for CUDA tensors: torch's own error follows
    }
    TORCH_CHECK(backend != "gloo", "gloo gets memory of a device (stand-in: ", operation, " of ", name_of(group),
                " with memory of device ", device, "; gloo reads it on the host; give the group NCCL for CUDA tensors)");
}

std::vector<int> ranks_of(c10d::ProcessGroup& group) {
    std::vector<int> result;
    try {
        const auto& ranks = group.getBackend(c10::DeviceType::CUDA)->getBackendOptions()->global_ranks_in_group;
        result.assign(ranks.begin(), ranks.end());
    } catch (const c10::Error&) {
        // Another backend than NCCL: its calls are not followed.
    }
    if (!result.empty()) return result;
    // The world lists none.
    result.resize(static_cast<size_t>(group.getSize()));
    std::iota(result.begin(), result.end(), 0);
    return result;
}

// This thread is in a collective of torch, also while torch waits for a communicator of the group.
struct Entered {
    Entered(c10d::ProcessGroup& group, const std::string& operation)
        : known{name_of(group), ranks_of(group), standin::processes_of(name_of(group))},
          slot(known, operation + " at " + standin::python_caller(), false) {
        standin::set_group(known);
    }
    ~Entered() { standin::set_group({}); }

    standin::Group known;
    standin::WaitSlot slot;
};

void enter_group(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, Stack* stack) {
    const auto& arguments = operation.schema().arguments();
    int device = -1;
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    const size_t first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
        const IValue& value = (*stack)[first + i];
        if (device < 0) device = cuda_device_of(value);
        if (arguments[i].name() == "process_group") group = value.toCustomClass<c10d::ProcessGroup>();
    }
    if (group && device >= 0) check_backend(operation.schema().name(), *group, device);
    std::optional<Entered> entered;
    if (group && device >= 0) entered.emplace(*group, operation.schema().name());
    const c10::DispatchKeySet rest(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    operation.redispatchBoxed(keys & rest, stack);
}

bool takes_group(const c10::OperatorHandle& operation) {
    if (!operation.hasSchema()) return false;
    for (const auto& argument : operation.schema().arguments())
        if (argument.name() == "process_group") return true;
    return false;
}

// Never destroyed: the dispatcher is, before it, at exit.
torch::Library* watch_collectives() {
    auto* library = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        if (name.name.rfind("c10d::", 0) != 0) continue;
        const auto operation = dispatcher.findOp(name);
        if (operation && takes_group(*operation))
            library->impl(name.name.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&enter_group>());
    }
    return library;
}

torch::Library* const watched = watch_collectives();

}  // namespace
