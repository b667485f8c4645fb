// Numbers: each CUDA kernel of torch's dispatcher is replaced by the CPU's, on CPU tensors over the same memory.
// Allocation, views, streams and plain copies stay torch's own CUDA code.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <unordered_map>

#include "accesses.h"
#include "standin.h"

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// Operators of torch's CUDA code that launch no kernel.
const std::set<std::string>& kept_operators() {
    static const std::set<std::string> names{
        "aten::empty", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::view_as_real",
        "aten::view_as_complex", "aten::_reshape_alias", "aten::unfold", "aten::set_", "aten::resize_",
        "aten::_pin_memory", "aten::is_pinned", "aten::record_stream", "aten::_local_scalar_dense", "aten::_copy_from",
        "aten::_copy_from_and_resize", "aten::is_set_to", "aten::resize_as_", "aten::_resize_output_",
        // Replaced below by a function of its own.
        "aten::copy_"};
    return names;
}

// Operators that take indices on the CPU together with a CUDA tensor.
const std::set<std::string>& mixing_operators() {
    static const std::set<std::string> names{"aten::index", "aten::_index_put_impl_", "aten::index_put_",
                                             "aten::_index_put_impl", "aten::_foreach_copy_"};
    return names;
}

// Operators that wait for the device, since a number or a shape of theirs depends on values. `.item()` is torch's own.
bool waits_for_device(const std::string& name, const std::vector<IValue>& arguments) {
    static const std::set<std::string> names{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                             "aten::unique_consecutive", "aten::equal", "aten::bincount"};
    if (names.count(name)) return true;
    if (name == "aten::repeat_interleave") return arguments.size() > 1 && arguments[1].isNone();
    const bool takes_masks = name == "aten::index" || name == "aten::_index_put_impl_";
    if (!takes_masks || !arguments[1].isOptionalTensorList()) return false;
    for (const std::optional<Tensor>& index : arguments[1].toOptionalTensorVector())
        if (index && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) return true;
    return false;
}

void check(int code, const std::string& operation) {
    TORCH_CHECK(!code, "CUDA error: ",
                code == standin::kIllegalAddress ? "an illegal memory access was encountered" : "the operator failed",
                " (stand-in: ", operation, ": ", standin::fault_text(code), ")");
}

// A range of device memory that an operator reads or writes.
struct Range {
    const void* address;
    size_t bytes;
};

Range range_of(const Tensor& tensor) {
    if (tensor.numel() == 0) return {nullptr, 0};
    int64_t first = tensor.storage_offset();
    int64_t last = first;
    for (int64_t k = 0; k < tensor.dim(); k++) last += (tensor.size(k) - 1) * tensor.stride(k);
    const auto size = static_cast<int64_t>(tensor.element_size());
    return {static_cast<const char*>(tensor.storage().data()) + first * size,
            static_cast<size_t>((last - first + 1) * size)};
}

// CPU tensors over the memory of one call's CUDA tensors.
class Aliases {
public:
    // With `keeps_memory` the aliases own their storage; a graph must not, since its pool reuses the memory.
    explicit Aliases(std::string operation, bool keeps_memory = true)
        : operation_(std::move(operation)), keeps_memory_(keeps_memory) {}

    Tensor of(const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (tensor.device().is_cpu()) {
            // Tensors without dimensions are numbers: CUDA kernels take them from the host.
            if (tensor.dim() > 0) has_cpu_operand_ = true;
            return tensor;
        }
        if (!tensor.device().is_cuda() || tensor.layout() != at::kStrided) return tensor;
        check_device(tensor);
        check_bounds(tensor);
        Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(storage_of(tensor)), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
        auto* impl = alias.unsafeGetTensorImpl();
        impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        alias._set_conj(tensor.is_conj());
        alias._set_neg(tensor.is_neg());
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
        return alias;
    }

    IValue of(const IValue& value) {
        if (value.isTensor()) return of(value.toTensor());
        if (value.isTensorList()) {
            c10::List<Tensor> aliases;
            for (const Tensor& tensor : value.toTensorVector()) aliases.push_back(of(tensor));
            return aliases;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> aliases;
            for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
                aliases.push_back(tensor ? std::optional<Tensor>(of(*tensor)) : std::nullopt);
            return aliases;
        }
        if (value.isDevice() && value.toDevice().is_cuda()) {
            const c10::Device device = value.toDevice();
            if (device_ < 0) device_ = device.has_index() ? device.index() : c10::cuda::current_device();
            return c10::Device(c10::kCPU);
        }
        // Random numbers are those of the CPU's default generator: a seed gives the CPU's numbers.
        if (value.isGenerator()) return IValue();
        return value;
    }

    int device() const { return device_ < 0 ? c10::cuda::current_device() : device_; }
    bool mixes_cpu_and_cuda() const { return has_cpu_operand_ && device_ >= 0; }

    // The CUDA storage under an alias, or null.
    const c10::Storage* original(const Tensor& alias) const {
        const auto found = originals_.find(alias.storage().unsafeGetStorageImpl());
        return found == originals_.end() ? nullptr : &found->second;
    }

private:
    void check_device(const Tensor& tensor) {
        const int device = tensor.device().index();
        TORCH_CHECK(device_ < 0 || device_ == device || tensor.dim() == 0,
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:", device_,
                    " and cuda:", device, "! (stand-in, ", operation_, ")");
        if (device_ < 0 || tensor.dim() > 0) device_ = device;
    }

    void check_bounds(const Tensor& tensor) const {
        if (tensor.numel() == 0) return;
        int64_t last = tensor.storage_offset();
        for (int64_t k = 0; k < tensor.dim(); k++) last += (tensor.size(k) - 1) * tensor.stride(k);
        const size_t end = static_cast<size_t>(last + 1) * tensor.element_size();
        TORCH_CHECK(end <= tensor.storage().nbytes(),
                    "CUDA error: an illegal memory access was encountered (stand-in: ", operation_, " uses ", end,
                    " bytes of a storage of ", tensor.storage().nbytes(), ")");
        const void* start = tensor.storage().data();
        standin::Region region;
        TORCH_CHECK(standin::find_region(start, &region), "CUDA error: an illegal memory access was encountered "
                    "(stand-in: an operand of ", operation_, " is in no allocation)");
        TORCH_CHECK(region.kind != standin::Kind::kDevice || region.device == tensor.device().index(),
                    "CUDA error: an illegal memory access was encountered (stand-in: an operand of ", operation_,
                    " on device ", tensor.device().index(), " lies in memory of device ", region.device, ")");
        check(standin::check_range(start, end, "an operand"), operation_);
    }

    const c10::Storage& storage_of(const Tensor& tensor) {
        const c10::Storage& storage = tensor.storage();
        auto found = aliases_.find(storage.unsafeGetStorageImpl());
        if (found != aliases_.end()) return found->second;
        void* address = storage.data_ptr().get();
        const auto release = [](void* owner) { delete static_cast<c10::Storage*>(owner); };
        c10::DataPtr memory = keeps_memory_ ? c10::DataPtr(address, new c10::Storage(storage), release, c10::kCPU)
                                            : c10::DataPtr(address, c10::kCPU);
        c10::Storage alias(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                                 std::move(memory), at::getCPUAllocator(), true));
        originals_.emplace(alias.unsafeGetStorageImpl(), storage);
        return aliases_.emplace(storage.unsafeGetStorageImpl(), alias).first->second;
    }

    std::string operation_;
    bool keeps_memory_;
    bool has_cpu_operand_ = false;
    int device_ = -1;
    std::unordered_map<c10::StorageImpl*, c10::Storage> aliases_;
    std::unordered_map<c10::StorageImpl*, c10::Storage> originals_;
};

void* current_stream(int device) {
    return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

void add_accesses(const IValue& value, bool is_write, const std::string& operation,
                  std::vector<standin::Access>* accesses) {
    const auto add = [&](const Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_cuda() || tensor.layout() != at::kStrided) return;
        const Range range = range_of(tensor);
        accesses->push_back({range.address, range.bytes, is_write, operation});
    };
    if (value.isTensor()) add(value.toTensor());
    if (value.isTensorList())
        for (const Tensor& tensor : value.toTensorVector()) add(tensor);
    if (value.isOptionalTensorList())
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
            if (tensor) add(*tensor);
}

std::string full_name(const c10::OperatorHandle& operation) {
    const auto& name = operation.operator_name();
    return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void copy_on_host(const Tensor& target, const Tensor& source) {
    at::AutoDispatchBelowADInplaceOrView guard;
    Tensor written = target;
    at::native::copy_(written, source, false);
}

// A result of the CPU kernel as a CUDA tensor: a view of an operand, or a copy in new device memory.
Tensor to_cuda(const Aliases& aliases, const Tensor& result, int device, const std::string& operation) {
    if (!result.defined() || !result.device().is_cpu() || result.layout() != at::kStrided) return result;
    if (const c10::Storage* original = aliases.original(result)) {
        Tensor view = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(*original), c10::DispatchKeySet(c10::DispatchKey::CUDA), result.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
        return view;
    }
    const auto options = result.options().device(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
    Tensor made = result.is_non_overlapping_and_dense()
                      ? at::empty_strided(result.sizes(), result.strides(), options)
                      : at::empty(result.sizes(), options);
    if (result.numel() > 0) copy_on_host(Aliases(operation).of(made), result);
    return made;
}

// `out=` arguments that the CPU kernel resized: the CUDA tensor gets the same shape and values.
void write_back(const Aliases& aliases, const Tensor& operand, const Tensor& alias, const std::string& operation) {
    if (!operand.defined() || !operand.is_cuda() || operand.layout() != at::kStrided) return;
    const bool is_same_memory = aliases.original(alias) && alias.storage().data() == operand.storage().data();
    if (operand.sizes() == alias.sizes() && is_same_memory) return;
    Tensor resized = operand;
    resized.resize_(alias.sizes());
    if (alias.numel() > 0) copy_on_host(Aliases(operation).of(resized), alias);
}

// The argument that a return value is, by the annotations of the schema (`Tensor(a!)`), or -1.
int argument_returned(const c10::FunctionSchema& schema, size_t number) {
    if (number >= schema.returns().size()) return -1;
    const auto* returned = schema.returns()[number].alias_info();
    if (!returned || !returned->isWrite()) return -1;
    for (size_t i = 0; i < schema.arguments().size(); i++) {
        const auto* argument = schema.arguments()[i].alias_info();
        if (argument && argument->beforeSets() == returned->beforeSets()) return static_cast<int>(i);
    }
    return -1;
}

// A graph computes the operator again, on the memory of the capture.
void record_for_replay(const c10::OperatorHandle& operation, const std::vector<IValue>& arguments,
                       const std::vector<Tensor>& results, void* stream) {
    const std::string name = full_name(operation);
    Aliases aliases(name, false);
    Stack inputs;
    std::vector<Tensor> outputs;
    for (const IValue& argument : arguments) inputs.push_back(aliases.of(argument));
    for (const Tensor& result : results) outputs.push_back(aliases.of(result));
    std::vector<standin::Access> used;
    for (const IValue& argument : arguments) add_accesses(argument, false, name, &used);
    standin::record_operation(stream, [operation, inputs, outputs, used, name] {
        for (const standin::Access& access : used)
            if (const int code = standin::check_range(access.address, access.bytes, name.c_str())) return code;
        at::AutoDispatchBelowADInplaceOrView guard;
        Stack stack = inputs;
        operation.callBoxed(&stack);
        size_t next = 0;
        const auto store = [&](const Tensor& value) {
            const Tensor& target = outputs[next++];
            if (target.defined() && value.defined()) copy_on_host(target, value);
        };
        for (const IValue& value : stack) {
            if (value.isTensor()) store(value.toTensor());
            if (value.isTensorList())
                for (const Tensor& element : value.toTensorVector()) store(element);
        }
        return int{standin::kSuccess};
    });
}

// Keeps the memory that an operator writes while its stream is captured, since a capture changes none in the end.
void keep_written(void* stream, const std::vector<standin::Access>& accesses) {
    for (const standin::Access& access : accesses)
        if (access.is_write) standin::keep_until_capture_ends(stream, access.address, access.bytes);
}

void compute_on_host(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
    const auto& schema = operation.schema();
    const std::string name = full_name(operation);
    const size_t count = schema.arguments().size();
    const std::vector<IValue> arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    stack->resize(stack->size() - count);

    Aliases aliases(name);
    Stack on_host;
    for (const IValue& argument : arguments) on_host.push_back(aliases.of(argument));
    TORCH_CHECK(!aliases.mixes_cpu_and_cuda() || mixing_operators().count(schema.name()),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                aliases.device(), " and cpu! (stand-in, ", name, ")");
    const auto is_written = [&](size_t i) {
        const auto* information = schema.arguments()[i].alias_info();
        return information && information->isWrite();
    };
    const c10::cuda::CUDAGuard device_guard(static_cast<c10::DeviceIndex>(aliases.device()));
    void* stream = current_stream(aliases.device());
    const bool is_captured = standin::capture_status(stream, nullptr, nullptr);
    check(standin::begin_work(stream, name.c_str()), name);
    if (standin::is_strict() || is_captured) {
        std::vector<standin::Access> accesses;
        for (size_t i = 0; i < count; i++) add_accesses(arguments[i], is_written(i), name, &accesses);
        check(standin::note_accesses(stream, accesses), name);
        if (is_captured) keep_written(stream, accesses);
    }
    if (waits_for_device(schema.name(), arguments)) check(standin::synchronize_stream(stream), name);
    const std::vector<IValue> host_arguments(on_host.begin(), on_host.end());
    {
        at::AutoDispatchBelowADInplaceOrView guard;
        c10::impl::ExcludeDispatchKeyGuard without_autocast(
            c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}));
        operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &on_host);
    }
    for (size_t i = 0; i < count; i++)
        if (is_written(i) && arguments[i].isTensor())
            write_back(aliases, arguments[i].toTensor(), host_arguments[i].toTensor(), name);
    // One entry a tensor returned; undefined where the operator itself writes an argument.
    std::vector<Tensor> results;
    for (size_t number = 0; number < on_host.size(); number++) {
        const IValue& value = on_host[number];
        const int returned = argument_returned(schema, number);
        if (returned >= 0) {
            stack->push_back(arguments[static_cast<size_t>(returned)]);
            results.resize(results.size() + (value.isTensorList() ? value.toTensorVector().size() : 1));
        } else if (value.isTensor()) {
            results.push_back(to_cuda(aliases, value.toTensor(), aliases.device(), name));
            stack->push_back(results.back());
        } else if (value.isTensorList()) {
            c10::List<Tensor> made;
            for (const Tensor& tensor : value.toTensorVector()) {
                results.push_back(to_cuda(aliases, tensor, aliases.device(), name));
                made.push_back(results.back());
            }
            stack->push_back(made);
        } else {
            stack->push_back(value);
        }
    }
    if (standin::is_strict()) {
        std::vector<standin::Access> accesses;
        for (const Tensor& result : results)
            if (result.defined()) add_accesses(result, true, name, &accesses);
        check(standin::note_accesses(stream, accesses), name);
    }
    if (is_captured) record_for_replay(operation, arguments, results, stream);
}

bool is_plain_copy(const Tensor& target, const Tensor& source) {
    const bool is_same_layout = (target.is_contiguous() && source.is_contiguous()) ||
                                (target.strides() == source.strides() && target.is_non_overlapping_and_dense());
    return target.dtype() == source.dtype() && target.sizes() == source.sizes() && is_same_layout &&
           target.is_conj() == source.is_conj() && target.is_neg() == source.is_neg();
}

// A plain copy is torch's own: cudaMemcpyAsync on the stream. One that converts or gathers needs a kernel.
Tensor& copy_tensor(Tensor& target, const Tensor& source, bool non_blocking) {
    if (target.numel() == 0 || target.is_same(source)) return target;
    // torch's own code converts and gathers on one side, by copies that come here again, and then copies plainly.
    const bool has_host = target.is_cpu() || source.is_cpu();
    if (has_host || is_plain_copy(target, source)) return at::native::copy_(target, source, non_blocking);
    // Two devices are allowed here: each side gets aliases of its own.
    const Tensor to = Aliases("aten::copy_").of(target);
    const Tensor from = Aliases("aten::copy_").of(source);
    const auto device = target.is_cuda() ? target.device().index() : source.device().index();
    const c10::cuda::CUDAGuard device_guard(device);
    void* stream = current_stream(device);
    check(standin::begin_work(stream, "aten::copy_"), "aten::copy_");
    std::vector<standin::Access> accesses;
    add_accesses(source, false, "aten::copy_", &accesses);
    add_accesses(target, true, "aten::copy_", &accesses);
    check(standin::note_accesses(stream, accesses), "aten::copy_");
    const bool is_captured = standin::capture_status(stream, nullptr, nullptr);
    if (is_captured) keep_written(stream, accesses);
    copy_on_host(to, from);
    if (!is_captured) return target;
    const Tensor to_replay = Aliases("aten::copy_", false).of(target);
    const Tensor from_replay = Aliases("aten::copy_", false).of(source);
    standin::record_operation(stream, [to_replay, from_replay, accesses] {
        for (const standin::Access& access : accesses)
            if (const int code = standin::check_range(access.address, access.bytes, "aten::copy_")) return code;
        copy_on_host(to_replay, from_replay);
        return int{standin::kSuccess};
    });
    return target;
}

bool is_replaced(const c10::OperatorName& name, const c10::OperatorHandle& operation) {
    return name.name.rfind("aten::", 0) == 0 && operation.hasSchema() && !kept_operators().count(name.name) &&
           operation.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
           operation.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) &&
           name.name.find("cudnn") == std::string::npos;
}

// torch warns that kernels are overridden, which is the purpose.
struct Silence : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

// Lets an operator of any library compute on the host; its CPU kernel must be registered. Raises where it is unknown.
void replace_operator(std::string name, std::string overload) {
    Silence silence;
    c10::WarningUtils::WarningHandlerGuard quiet(&silence);
    c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    // Never destroyed, as the one of torch's own operators.
    auto* library = new torch::Library(torch::Library::IMPL, name.substr(0, name.find("::")), c10::DispatchKey::CUDA,
                                       __FILE__, __LINE__);
    const std::string full = overload.empty() ? name : name + "." + overload;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

// Checks tensors that host code, such as Triton's interpreter, reads and writes through their addresses. What it writes
// is not known, so the tensors count as read.
void use_tensors(at::TensorList tensors, std::string name) {
    Aliases aliases(name);
    std::vector<standin::Access> accesses;
    for (const Tensor& tensor : tensors) {
        aliases.of(tensor);
        add_accesses(tensor, false, name, &accesses);
    }
    const c10::cuda::CUDAGuard device_guard(static_cast<c10::DeviceIndex>(aliases.device()));
    void* stream = current_stream(aliases.device());
    TORCH_CHECK(!standin::capture_status(stream, nullptr, nullptr), name, " in a capture is not imitated (stand-in)");
    check(standin::begin_work(stream, name.c_str()), name);
    check(standin::note_accesses(stream, accesses), name);
}

void* torch_stream(int device) { return current_stream(device); }

// Never destroyed: the dispatcher is, before it, at exit.
torch::Library* replace_kernels() {
    Silence silence;
    c10::WarningUtils::WarningHandlerGuard quiet(&silence);
    auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        const auto operation = dispatcher.findOp(name);
        if (!operation || !is_replaced(name, *operation)) continue;
        library->impl(full_name(*operation).c_str(), torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
    }
    library->impl("copy_", TORCH_FN(copy_tensor));
    // The fused attention kernels have no CPU kernel of the same name: the composition of plain operators remains.
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseCuDNN(false);
    standin::set_torch_stream_query(torch_stream);
    return library;
}

torch::Library* const replaced = replace_kernels();

}  // namespace

TORCH_LIBRARY(standin_gpu, library) {
    library.def("replace_operator(str name, str overload) -> ()", replace_operator);
    library.def("use(Tensor[] tensors, str name) -> ()", use_tensors);
}
