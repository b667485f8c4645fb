// Transformer Engine's operators of a dense layer, in 16 and 32 bits, by torch's CPU kernels on the same memory. The
// wheel's own library stays behind this one: its tensors, settings and choice of attention run unchanged.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <transformer_engine/activation.h>
#include <transformer_engine/fused_attn.h>
#include <transformer_engine/fused_rope.h>
#include <transformer_engine/gemm.h>
#include <transformer_engine/multi_tensor.h>
#include <transformer_engine/normalization.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "accesses.h"
#include "standin.h"

namespace standin {

// For the functions that are not imitated. They return nothing, so only an exception can stop their caller.
int unknown_operator(const char* name) {
    unknown_function(name);
    throw std::runtime_error(std::string(name) + " is not imitated (stand-in)");
}

}  // namespace standin

namespace {

using at::Tensor;

// ---- operands

[[noreturn]] void fail(const char* name, const std::string& text) {
    throw std::runtime_error("CUDA error: " + text + " (stand-in: " + name + ")");
}

void refuse_if(bool is_refused, const char* name, const char* feature) {
    if (is_refused) throw std::runtime_error(std::string(name) + " with " + feature + " is not imitated (stand-in)");
}

bool has_memory(NVTETensor tensor) { return tensor && nvte_tensor_data(tensor) && nvte_tensor_numel(tensor) > 0; }

at::ScalarType type_of(NVTETensor tensor) {
    switch (nvte_tensor_type(tensor)) {
        case kNVTEByte: return at::kByte;
        case kNVTEInt32: return at::kInt;
        case kNVTEInt64: return at::kLong;
        case kNVTEFloat32: return at::kFloat;
        case kNVTEFloat16: return at::kHalf;
        case kNVTEBFloat16: return at::kBFloat16;
        default: throw std::runtime_error("Transformer Engine's 8-bit and 4-bit tensors are not imitated (stand-in)");
    }
}

std::vector<int64_t> sizes_of(NVTETensor tensor) {
    const NVTEShape shape = nvte_tensor_shape(tensor);
    return std::vector<int64_t>(shape.data, shape.data + shape.ndim);
}

// The operand as a CPU tensor over its memory; undefined without memory.
Tensor view(NVTETensor tensor) {
    if (!has_memory(tensor)) return Tensor();
    return at::from_blob(nvte_tensor_data(tensor), sizes_of(tensor), at::TensorOptions().dtype(type_of(tensor)));
}

Tensor wide(NVTETensor tensor) { return view(tensor).to(at::kFloat); }

// All dimensions but the last as rows, in float32: [rows, last].
Tensor rows(NVTETensor tensor) {
    const Tensor values = wide(tensor);
    return values.reshape({-1, values.size(-1)});
}

// Rounds once, to the operand's type.
void store(NVTETensor tensor, const Tensor& values) {
    Tensor target = view(tensor);
    if (target.defined()) target.copy_(values.reshape(target.sizes()));
}

standin::Access access(NVTETensor tensor, bool is_write, const char* name) {
    return {nvte_tensor_data(tensor), nvte_tensor_size_bytes(tensor), is_write, name};
}

// A function's call: its memory is checked, and counts as used in its stream.
class Call {
public:
    Call(const char* name, cudaStream_t stream, const std::vector<NVTETensor>& read,
         const std::vector<NVTETensor>& written) {
        std::vector<standin::Access> accesses;
        for (const NVTETensor tensor : read)
            if (has_memory(tensor)) accesses.push_back(access(tensor, false, name));
        for (const NVTETensor tensor : written)
            if (has_memory(tensor)) accesses.push_back(access(tensor, true, name));
        begin(name, stream, accesses);
    }

    Call(const char* name, cudaStream_t stream, const std::vector<standin::Access>& accesses) {
        begin(name, stream, accesses);
    }

private:
    static void begin(const char* name, cudaStream_t stream, const std::vector<standin::Access>& accesses) {
        refuse_if(standin::capture_status(stream, nullptr, nullptr), name, "a captured stream");
        for (const standin::Access& one : accesses) check_memory(name, one, standin::stream_device(stream));
        check(name, standin::begin_work(stream, name));
        check(name, standin::note_accesses(stream, accesses));
    }

    static void check(const char* name, int code) {
        if (code == standin::kIllegalAddress) fail(name, illegal + ": " + standin::fault_text(code));
        if (code) fail(name, standin::fault_text(code));
    }

    static void check_memory(const char* name, const standin::Access& one, int device) {
        standin::Region region;
        if (!standin::find_region(one.address, &region)) fail(name, illegal + ": an operand is in no allocation");
        if (region.kind == standin::Kind::kDevice && region.device != device)
            fail(name, illegal + ": an operand is in memory of device " + std::to_string(region.device) +
                           ", the stream is one of device " + std::to_string(device));
        check(name, standin::check_range(one.address, one.bytes, "an operand"));
    }

    inline static const std::string illegal = "an illegal memory access was encountered";
    // The operators below are torch's, on plain tensors.
    at::AutoDispatchBelowADInplaceOrView without_autograd_;
};

// Functions with a workspace are called twice. The first call, without its memory, asks for the size.
bool asks_for_size(NVTETensor workspace) {
    if (nvte_tensor_data(workspace)) return false;
    const size_t one = 1;
    const NVTEBasicTensor needed{nullptr, kNVTEByte, nvte_make_shape(&one, 1)};
    nvte_set_tensor_param(&workspace, kNVTERowwiseData, &needed);
    return true;
}

std::vector<int64_t> numbers(NVTETensor tensor) {
    const Tensor found = view(tensor).to(at::kLong).contiguous();
    return std::vector<int64_t>(found.data_ptr<int64_t>(), found.data_ptr<int64_t>() + found.numel());
}

// ---- norms

Tensor factor(NVTETensor gamma, bool is_zero_centered) { return is_zero_centered ? wide(gamma) + 1 : wide(gamma); }

// The gradients of x and gamma. `added` is a further gradient of x, or undefined.
void rms_norm_backward(NVTETensor dz, NVTETensor x, NVTETensor rsigma, NVTETensor gamma, NVTETensor dx,
                       NVTETensor dgamma, bool is_zero_centered, const Tensor& added) {
    const Tensor scale = wide(rsigma).reshape({-1, 1});
    const Tensor normed = rows(x) * scale, gradient = rows(dz);
    const Tensor of_normed = gradient * factor(gamma, is_zero_centered);
    Tensor result = scale * (of_normed - normed * (of_normed * normed).mean(-1, true));
    if (added.defined()) result += added;
    store(dx, result);
    store(dgamma, (gradient * normed).sum(0));
}

// ---- rotary embeddings

// Angles [positions] are turned pair by pair: the second half of the channels belongs to the first one, or each odd
// channel to the even one before it.
Tensor swapped(const Tensor& x, bool is_interleaved, bool negates_second) {
    const int64_t half = x.size(-1) / 2;
    Tensor first, second;
    if (is_interleaved) {
        const Tensor pairs = x.unflatten(-1, {half, 2});
        first = pairs.select(-1, 0), second = pairs.select(-1, 1);
    } else {
        first = x.narrow(-1, 0, half), second = x.narrow(-1, half, half);
    }
    const Tensor left = negates_second ? -second : second, right = negates_second ? first : -first;
    return is_interleaved ? at::stack({left, right}, -1).flatten(-2) : at::cat({left, right}, -1);
}

// Positions of a rank's tokens of a sequence of `length` local tokens: two of 2 * cp_size chunks with context
// parallelism, all of them in order without.
Tensor positions_of(int64_t length, int cp_size, int cp_rank) {
    if (cp_size == 1) return at::arange(length);
    const int64_t half = length / 2;
    const Tensor chunk = at::arange(half);
    return at::cat({chunk + cp_rank * half, chunk + (2 * cp_size - 1 - cp_rank) * half});
}

struct Rope {
    NVTE_QKV_Format format;
    bool is_interleaved;
    int cp_size;
    int cp_rank;
    // Sizes and strides of the input. `s` is the number of frequencies in the format THD.
    int s, b, h, d, d2;
    int stride_s, stride_b, stride_h, stride_d;
};

void turn(const char* name, NVTETensor input, NVTETensor cu_seqlens, NVTETensor freqs, NVTETensor starts,
          NVTETensor output, const Rope& rope, bool is_backward, cudaStream_t stream) {
    refuse_if(has_memory(starts), name, "start positions");
    const bool is_packed = rope.format == NVTE_THD;
    refuse_if(!is_packed && rope.format != NVTE_SBHD && rope.format != NVTE_BSHD, name, "this format");
    // Tokens first, sequences of a batch second: [s, b, h, d]; packed ones are a batch of one.
    const int64_t length = is_packed ? sizes_of(input)[0] : rope.s, batch = is_packed ? 1 : rope.b;
    const std::vector<int64_t> sizes{length, batch, rope.h, rope.d};
    const std::vector<int64_t> strides{rope.stride_s, rope.stride_b, rope.stride_h, rope.stride_d};
    int64_t last = 0;
    for (size_t k = 0; k < sizes.size(); k++) last += (sizes[k] - 1) * strides[k];
    if (!has_memory(input)) return;
    std::vector<standin::Access> accesses{access(input, false, name), access(freqs, false, name),
                                          access(output, true, name)};
    accesses[0].bytes = static_cast<size_t>(last + 1) * nvte_tensor_element_size(input);
    if (is_packed) accesses.push_back(access(cu_seqlens, false, name));
    const Call call(name, stream, accesses);

    const auto options = at::TensorOptions().dtype(type_of(input));
    const Tensor x = at::from_blob(nvte_tensor_data(input), sizes, strides, options);
    Tensor target = view(output);
    target = is_packed ? target.unsqueeze(1) : rope.format == NVTE_BSHD ? target.transpose(0, 1) : target;
    const Tensor angles = wide(freqs).reshape({-1, rope.d2});
    const auto turn_tokens = [&](int64_t first, int64_t count) {
        if (count == 0) return;
        const Tensor positions = positions_of(count, rope.cp_size, rope.cp_rank);
        if (positions.max().item<int64_t>() >= angles.size(0))
            fail(name, "an illegal memory access was encountered: position " +
                           std::to_string(positions.max().item<int64_t>()) + " of " + std::to_string(angles.size(0)) +
                           " frequencies");
        const Tensor angle = angles.index_select(0, positions).view({count, 1, 1, rope.d2});
        const Tensor tokens = x.narrow(0, first, count), turned = tokens.narrow(-1, 0, rope.d2).to(at::kFloat);
        const Tensor other = is_backward ? swapped(turned * angle.sin(), rope.is_interleaved, false)
                                         : swapped(turned, rope.is_interleaved, true) * angle.sin();
        Tensor place = target.narrow(0, first, count);
        place.narrow(-1, 0, rope.d2).copy_(turned * angle.cos() + other);
        if (rope.d > rope.d2)
            place.narrow(-1, rope.d2, rope.d - rope.d2).copy_(tokens.narrow(-1, rope.d2, rope.d - rope.d2));
    };
    if (!is_packed) return turn_tokens(0, length);
    // Tokens after the last sequence are left as they are.
    const std::vector<int64_t> ends = numbers(cu_seqlens);
    for (size_t n = 0; n + 1 < ends.size(); n++)
        turn_tokens(ends[n] / rope.cp_size, (ends[n + 1] - ends[n]) / rope.cp_size);
}

// ---- attention

// Queries, keys or values: where the tokens of each sequence of a batch lie.
struct Batch {
    NVTE_QKV_Format format;
    std::vector<int64_t> starts;  // first token in the format THD
    std::vector<int64_t> lengths;

    Batch(NVTE_QKV_Format format, NVTETensor cu_seqlens, NVTETensor cu_padded, size_t longest, bool has_padding)
        : format(format) {
        const std::vector<int64_t> ends = numbers(cu_seqlens);
        starts = has_memory(cu_padded) ? numbers(cu_padded) : ends;
        for (size_t n = 0; n + 1 < ends.size(); n++)
            lengths.push_back(has_padding || format == NVTE_THD ? ends[n + 1] - ends[n]
                                                                : static_cast<int64_t>(longest));
    }

    // The tokens of a sequence: [length, heads, channels].
    Tensor tokens(const Tensor& all, int64_t n) const {
        if (format == NVTE_THD) return all.narrow(0, starts[n], lengths[n]);
        return (format == NVTE_SBHD ? all.select(1, n) : all.select(0, n)).narrow(0, 0, lengths[n]);
    }

    // The softmax statistics of a sequence's queries: [heads, length].
    Tensor statistics(const Tensor& all, int64_t n) const {
        if (format == NVTE_THD) return all.narrow(0, starts[n], lengths[n]).squeeze(-1).t();
        return all.select(0, n).narrow(1, 0, lengths[n]).squeeze(-1);
    }
};

struct Mask {
    bool has_padding;
    bool is_causal;
    int64_t left;
    int64_t right;
};

Mask mask_of(const char* name, NVTE_Mask_Type type, int64_t left, int64_t right) {
    const bool has_padding = type == NVTE_PADDING_MASK || type == NVTE_PADDING_CAUSAL_MASK ||
                             type == NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK;
    const bool is_causal = type != NVTE_NO_MASK && type != NVTE_PADDING_MASK;
    return {has_padding, is_causal, left, is_causal ? 0 : right};
}

void check_attention(const char* name, NVTETensor q, NVTE_QKV_Layout layout, NVTE_Bias_Type bias,
                     NVTE_Softmax_Type softmax, float dropout) {
    refuse_if(nvte_get_qkv_layout_group(layout) != NVTE_HD_HD_HD, name, "queries, keys and values in one tensor");
    refuse_if(nvte_get_q_format(layout) != nvte_get_kv_format(layout), name, "queries and keys in two formats");
    refuse_if(bias != NVTE_NO_BIAS, name, "a bias");
    refuse_if(softmax != NVTE_VANILLA_SOFTMAX, name, "sinks");
    refuse_if(dropout != 0, name, "dropout");
    // cuDNN's kernels take no others.
    refuse_if(type_of(q) != at::kHalf && type_of(q) != at::kBFloat16, name, "other types than float16 and bfloat16");
}

// kernels.py computes torch's operator of packed sequences. It aligns the last query with the last key; Transformer
// Engine's plain causal masks align the first ones, which is the same for as many queries as keys.
void check_lengths(const char* name, NVTE_Mask_Type type, int64_t queries, int64_t keys) {
    refuse_if((type == NVTE_CAUSAL_MASK || type == NVTE_PADDING_CAUSAL_MASK) && queries != keys, name,
              "a causal mask and other numbers of queries than keys");
}

Tensor ends_of(int64_t length) { return at::tensor({int64_t{0}, length}, at::kInt); }

// ---- attention over context-parallel ranks

// Packed sequences, each of an even number of tokens. `half` tensors hold one half of each sequence.
struct Halves {
    std::vector<int64_t> ends;

    explicit Halves(NVTETensor cu_seqlens) : ends(numbers(cu_seqlens)) {}

    // Calls `work(whole, half)` with a half of each sequence (0 or 1) of a tensor of all tokens, and the place in a
    // tensor of halves. Both tensors have the tokens in the dimension `dim`, counted from the front.
    template <class Work>
    void each(const Tensor& whole, const Tensor& half, int64_t which, int64_t dim, Work work) const {
        for (size_t n = 0; n + 1 < ends.size(); n++) {
            const int64_t size = (ends[n + 1] - ends[n]) / 2;
            work(whole.narrow(dim, ends[n] + which * size, size), half.narrow(dim, ends[n] / 2, size));
        }
    }
};

// ---- optimizers

std::vector<std::vector<NVTETensor>> lists_of(NVTETensor** lists, size_t num_lists, size_t num_tensors) {
    std::vector<std::vector<NVTETensor>> found;
    for (size_t n = 0; n < num_lists; n++) found.emplace_back(lists[n], lists[n] + num_tensors);
    return found;
}

void set_if_infinite(NVTETensor flag, const Tensor& values) {
    if (!at::isfinite(values).all().item<bool>()) view(flag).fill_(1);
}

void l2_norm(const char* name, NVTETensor noop_flag, NVTETensor** given, size_t num_lists, size_t num_tensors,
             NVTETensor ret, NVTETensor ret_per_tensor, NVTETensor inv_scale, int per_tensor, cudaStream_t stream) {
    const auto lists = lists_of(given, num_lists, num_tensors);
    std::vector<NVTETensor> read = lists[0];
    if (inv_scale) read.push_back(inv_scale);
    const Call call(name, stream, read, {noop_flag, ret, ret_per_tensor});
    const float scale = inv_scale ? view(inv_scale).item<float>() : 1.0f;
    Tensor squares = at::zeros({static_cast<int64_t>(num_tensors)});
    for (size_t n = 0; n < num_tensors; n++)
        if (has_memory(lists[0][n])) squares[static_cast<int64_t>(n)] = (wide(lists[0][n]) * scale).square().sum();
    set_if_infinite(noop_flag, squares);
    store(ret, squares.sum().sqrt());
    if (per_tensor) store(ret_per_tensor, squares.sqrt());
}

}  // namespace

extern "C" {

// ---- matrices

// Row by row: D = alpha * op(B) op(A) + beta * C + bias, since the function counts columns first.
void nvte_cublas_gemm_v2(int transa, int transb, const float* alpha, const NVTETensor A, const NVTETensor B,
                         const float* beta, const NVTETensor C, NVTETensor D, NVTETensor workspace,
                         NVTEMatmulConfig config, cudaStream_t stream) {
    const char* name = "nvte_cublas_gemm_v2";
    const auto setting = [&](NVTEMatmulConfigAttribute attribute, auto value) {
        size_t written = 0;
        if (config) nvte_get_matmul_config_attribute(config, attribute, &value, sizeof value, &written);
        return value;
    };
    const bool has_gelu = setting(kNVTEMatmulConfigWithGELUEpilogue, false);
    refuse_if(has_gelu || setting(kNVTEMatmulConfigWithDGELUEpilogue, false), name, "GELU");
    const NVTETensor bias = setting(kNVTEMatmulConfigBiasTensor, NVTETensor{});
    const NVTETensor dbias = setting(kNVTEMatmulConfigDBiasTensor, NVTETensor{});
    const Call call(name, stream, {A, B, bias, *beta == 0 ? nullptr : C}, {D, dbias});
    const Tensor a = rows(A), b = rows(B);
    Tensor result = at::matmul(transb ? b.t() : b, transa ? a.t() : a) * *alpha;
    if (*beta != 0) result += rows(C) * *beta;
    if (has_memory(bias)) result += wide(bias);
    store(D, result);
    if (has_memory(dbias)) store(dbias, b.sum(0));
}

// ---- norms and activations

void nvte_rmsnorm_fwd(const NVTETensor x, const NVTETensor gamma, const float epsilon, NVTETensor z, NVTETensor rsigma,
                      NVTETensor workspace, const int multiprocessorCount, const bool zero_centered_gamma,
                      cudaStream_t stream) {
    if (asks_for_size(workspace)) return;
    const Call call("nvte_rmsnorm_fwd", stream, {x, gamma}, {z, rsigma});
    const Tensor values = rows(x);
    const Tensor scale = at::rsqrt(values.square().mean(-1, true) + epsilon);
    store(rsigma, scale);
    store(z, values * scale * factor(gamma, zero_centered_gamma));
}

void nvte_rmsnorm_bwd(const NVTETensor dz, const NVTETensor x, const NVTETensor rsigma, const NVTETensor gamma,
                      NVTETensor dx, NVTETensor dgamma, NVTETensor workspace, const int multiprocessorCount,
                      const bool zero_centered_gamma, cudaStream_t stream) {
    if (asks_for_size(workspace)) return;
    const Call call("nvte_rmsnorm_bwd", stream, {dz, x, rsigma, gamma}, {dx, dgamma});
    rms_norm_backward(dz, x, rsigma, gamma, dx, dgamma, zero_centered_gamma, Tensor());
}

void nvte_rmsnorm_bwd_add(const NVTETensor dz, const NVTETensor x, const NVTETensor add, const NVTETensor rsigma,
                          const NVTETensor gamma, NVTETensor dx, NVTETensor dgamma, NVTETensor workspace,
                          const int multiprocessorCount, const bool zero_centered_gamma, cudaStream_t stream) {
    if (asks_for_size(workspace)) return;
    const Call call("nvte_rmsnorm_bwd_add", stream, {dz, x, add, rsigma, gamma}, {dx, dgamma});
    rms_norm_backward(dz, x, rsigma, gamma, dx, dgamma, zero_centered_gamma, rows(add));
}

void nvte_swiglu(const NVTETensor input, NVTETensor output, cudaStream_t stream) {
    const Call call("nvte_swiglu", stream, {input}, {output});
    const auto halves = rows(input).chunk(2, -1);
    store(output, at::silu(halves[0]) * halves[1]);
}

void nvte_dswiglu(const NVTETensor grad, const NVTETensor input, NVTETensor output, cudaStream_t stream) {
    const Call call("nvte_dswiglu", stream, {grad, input}, {output});
    const auto halves = rows(input).chunk(2, -1);
    const Tensor gate = halves[0].sigmoid(), gradient = rows(grad);
    const Tensor slope = gate * (1 + halves[0] * (1 - gate));
    store(output, at::cat({gradient * halves[1] * slope, gradient * halves[0] * gate}, -1));
}

// ---- rotary embeddings

void nvte_fused_rope_forward(const NVTETensor input, const NVTETensor cu_seqlens, const NVTETensor freqs,
                             const NVTETensor start_positions, NVTETensor output, const NVTE_QKV_Format qkv_format,
                             const bool interleaved, const int cp_size, const int cp_rank, const int s, const int b,
                             const int h, const int d, const int d2, const int stride_s_or_t, const int stride_b,
                             const int stride_h, const int stride_d, cudaStream_t stream) {
    const Rope rope{qkv_format, interleaved, cp_size, cp_rank, s, b, h, d, d2, stride_s_or_t, stride_b, stride_h,
                    stride_d};
    turn("nvte_fused_rope_forward", input, cu_seqlens, freqs, start_positions, output, rope, false, stream);
}

void nvte_fused_rope_backward(const NVTETensor output_grads, const NVTETensor cu_seqlens, const NVTETensor freqs,
                              const NVTETensor start_positions, NVTETensor input_grads,
                              const NVTE_QKV_Format qkv_format, const bool interleaved, const int cp_size,
                              const int cp_rank, const int s, const int b, const int h, const int d, const int d2,
                              const int stride_s_or_t, const int stride_b, const int stride_h, const int stride_d,
                              cudaStream_t stream) {
    const Rope rope{qkv_format, interleaved, cp_size, cp_rank, s, b, h, d, d2, stride_s_or_t, stride_b, stride_h,
                    stride_d};
    turn("nvte_fused_rope_backward", output_grads, cu_seqlens, freqs, start_positions, input_grads, rope, true,
         stream);
}

// ---- attention

void nvte_fused_attn_fwd(const NVTETensor Q, const NVTETensor K, const NVTETensor V, const NVTETensor Bias,
                         const NVTETensor SoftmaxOffset, NVTETensor S, NVTETensor O, NVTETensorPack* Aux_CTX_Tensors,
                         const NVTETensor cu_seqlens_q, const NVTETensor cu_seqlens_kv,
                         const NVTETensor cu_seqlens_q_padded, const NVTETensor cu_seqlens_kv_padded,
                         const NVTETensor page_table_k, const NVTETensor page_table_v, const NVTETensor rng_state,
                         size_t max_seqlen_q, size_t max_seqlen_kv, bool is_training, bool return_max_logit,
                         bool cuda_graph, float attn_scale, float dropout, NVTE_QKV_Layout qkv_layout,
                         NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type,
                         int64_t window_size_left, int64_t window_size_right, NVTETensor workspace,
                         cudaStream_t stream) {
    const char* name = "nvte_fused_attn_fwd";
    check_attention(name, Q, qkv_layout, bias_type, softmax_type, dropout);
    refuse_if(return_max_logit, name, "the largest score");
    refuse_if(has_memory(page_table_k) || has_memory(page_table_v), name, "pages");
    const NVTE_QKV_Format format = nvte_get_q_format(qkv_layout);
    const std::vector<int64_t> sizes = sizes_of(Q);
    if (asks_for_size(workspace)) {
        // The outputs for the backward pass, as fused_attn.h documents them: statistics and the random generator's state.
        const auto heads = static_cast<size_t>(sizes[sizes.size() - 2]);
        const size_t packed[] = {static_cast<size_t>(sizes[0]), heads, 1};
        const size_t batch = nvte_tensor_numel(cu_seqlens_q) - 1, padded[] = {batch, heads, max_seqlen_q, 1}, two = 2;
        const NVTEShape shape = format == NVTE_THD ? nvte_make_shape(packed, 3) : nvte_make_shape(padded, 4);
        const NVTEBasicTensor statistics{nullptr, kNVTEFloat32, shape};
        const NVTEBasicTensor state{nullptr, kNVTEInt64, nvte_make_shape(&two, 1)};
        nvte_set_tensor_param(&Aux_CTX_Tensors->tensors[0], kNVTERowwiseData, &statistics);
        nvte_set_tensor_param(&Aux_CTX_Tensors->tensors[1], kNVTERowwiseData, &state);
        Aux_CTX_Tensors->size = 2;
        return;
    }
    const NVTETensor statistics = Aux_CTX_Tensors->tensors[0];
    const Call call(name, stream,
                    {Q, K, V, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, rng_state},
                    {O, statistics});
    const Mask mask = mask_of(name, attn_mask_type, window_size_left, window_size_right);
    const Batch queries(format, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, mask.has_padding);
    const Batch keys(format, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv, mask.has_padding);
    const Tensor q = view(Q), k = view(K), v = view(V), out = view(O), sums = view(statistics);
    for (int64_t n = 0; n < static_cast<int64_t>(queries.lengths.size()); n++) {
        const int64_t num_q = queries.lengths[n], num_k = keys.lengths[n];
        check_lengths(name, attn_mask_type, num_q, num_k);
        if (num_q == 0) continue;
        const auto found = at::_flash_attention_forward(
            queries.tokens(q, n), keys.tokens(k, n), keys.tokens(v, n), ends_of(num_q), ends_of(num_k), num_q, num_k,
            0.0, mask.is_causal, false, attn_scale, mask.left, mask.right);
        queries.tokens(out, n).copy_(std::get<0>(found));
        queries.statistics(sums, n).copy_(std::get<1>(found));
    }
}

void nvte_fused_attn_bwd(const NVTETensor Q, const NVTETensor K, const NVTETensor V, const NVTETensor O,
                         const NVTETensor dO, const NVTETensor S, NVTETensor dP, const NVTETensorPack* Aux_CTX_Tensors,
                         NVTETensor dQ, NVTETensor dK, NVTETensor dV, NVTETensor dBias, NVTETensor dSoftmaxOffset,
                         const NVTETensor cu_seqlens_q, const NVTETensor cu_seqlens_kv,
                         const NVTETensor cu_seqlens_q_padded, const NVTETensor cu_seqlens_kv_padded,
                         size_t max_seqlen_q, size_t max_seqlen_kv, float attn_scale, float dropout,
                         NVTE_QKV_Layout qkv_layout, NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type,
                         NVTE_Softmax_Type softmax_type, int64_t window_size_left, int64_t window_size_right,
                         bool deterministic, bool cuda_graph, NVTETensor workspace, cudaStream_t stream) {
    const char* name = "nvte_fused_attn_bwd";
    check_attention(name, Q, qkv_layout, bias_type, softmax_type, dropout);
    if (asks_for_size(workspace)) return;
    const NVTETensor statistics = Aux_CTX_Tensors->tensors[0];
    const Call call(name, stream,
                    {Q, K, V, O, dO, statistics, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
                     cu_seqlens_kv_padded},
                    {dQ, dK, dV});
    const NVTE_QKV_Format format = nvte_get_q_format(qkv_layout);
    const Mask mask = mask_of(name, attn_mask_type, window_size_left, window_size_right);
    const Batch queries(format, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, mask.has_padding);
    const Batch keys(format, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv, mask.has_padding);
    const Tensor q = view(Q), k = view(K), v = view(V), out = view(O), gradient = view(dO), sums = view(statistics);
    const Tensor of_q = view(dQ), of_k = view(dK), of_v = view(dV), unused = at::zeros({2}, at::kLong);
    for (int64_t n = 0; n < static_cast<int64_t>(queries.lengths.size()); n++) {
        const int64_t num_q = queries.lengths[n], num_k = keys.lengths[n];
        check_lengths(name, attn_mask_type, num_q, num_k);
        if (num_q == 0) continue;
        const auto found = at::_flash_attention_backward(
            queries.tokens(gradient, n), queries.tokens(q, n), keys.tokens(k, n), keys.tokens(v, n),
            queries.tokens(out, n), queries.statistics(sums, n), ends_of(num_q), ends_of(num_k), num_q, num_k, 0.0,
            mask.is_causal, unused, unused, attn_scale, mask.left, mask.right);
        queries.tokens(of_q, n).copy_(std::get<0>(found));
        keys.tokens(of_k, n).copy_(std::get<1>(found));
        keys.tokens(of_v, n).copy_(std::get<2>(found));
    }
}

// Softmax statistics of packed rows are [heads, tokens], outputs and gradients [tokens, heads, channels].

void nvte_cp_thd_read_half_tensor(const NVTETensor& tensor, const NVTETensor& cu_seqlens, NVTETensor half, int half_idx,
                                  cudaStream_t stream) {
    const Call call("nvte_cp_thd_read_half_tensor", stream, {tensor, cu_seqlens}, {half});
    const Tensor whole = view(tensor);
    const auto copy = [](Tensor from, Tensor to) { to.copy_(from); };
    Halves(cu_seqlens).each(whole, view(half), half_idx, whole.dim() - 3, copy);
}

void nvte_cp_thd_second_half_lse_correction(NVTETensor lse, const NVTETensor& lse_per_step,
                                            const NVTETensor& cu_seqlens, int lse_packed, cudaStream_t stream) {
    const char* name = "nvte_cp_thd_second_half_lse_correction";
    refuse_if(!lse_packed, name, "padded statistics");
    const Call call(name, stream, {lse_per_step, cu_seqlens}, {lse});
    const auto add = [](Tensor sums, Tensor step) { sums.copy_(at::logaddexp(sums, step)); };
    Halves(cu_seqlens).each(view(lse), view(lse_per_step), 1, 1, add);
}

void nvte_cp_thd_read_second_half_lse(const NVTETensor& lse, const NVTETensor& cu_seqlens, NVTETensor half_lse,
                                      int lse_packed, int second_half_lse_seqlen, cudaStream_t stream) {
    const char* name = "nvte_cp_thd_read_second_half_lse";
    refuse_if(!lse_packed, name, "padded statistics");
    const Call call(name, stream, {lse, cu_seqlens}, {half_lse});
    Halves(cu_seqlens).each(view(lse), view(half_lse), 1, 1, [](Tensor from, Tensor to) { to.copy_(from); });
}

void nvte_cp_thd_out_correction(NVTETensor out, const NVTETensor& out_per_step, const NVTETensor& lse,
                                const NVTETensor& lse_per_step, const NVTETensor& cu_seqlens, int only_second_half,
                                int lse_packed, cudaStream_t stream) {
    const char* name = "nvte_cp_thd_out_correction";
    refuse_if(!lse_packed, name, "padded statistics");
    const Call call(name, stream, {out_per_step, lse, lse_per_step, cu_seqlens}, {out});
    const Tensor sums = view(lse), step = view(lse_per_step), values = wide(out_per_step), target = view(out);
    if (!only_second_half) {
        target.copy_(target + values * (step - sums).exp().t().unsqueeze(-1));
        return;
    }
    const Halves halves(cu_seqlens);
    // The share of this step's keys, for the second halves' queries: [heads, tokens / 2].
    const Tensor share = at::empty_like(step);
    halves.each(sums, share, 1, 1, [](Tensor all, Tensor place) { place.copy_(all); });
    const Tensor part = values * (step - share).exp().t().unsqueeze(-1);
    halves.each(target, part, 1, 0, [](Tensor place, Tensor more) { place.copy_(place + more); });
}

void nvte_cp_thd_grad_correction(NVTETensor grad, const NVTETensor& grad_per_step, const NVTETensor& cu_seqlens,
                                 const char* first_half, const char* second_half, cudaStream_t stream) {
    const Call call("nvte_cp_thd_grad_correction", stream, {grad_per_step, cu_seqlens}, {grad});
    const std::string verbs[] = {first_half, second_half};
    const Tensor target = view(grad), step = view(grad_per_step);
    const bool has_halves = verbs[0] == "none" || verbs[1] == "none";
    const Halves halves(cu_seqlens);
    for (int64_t which : {0, 1}) {
        const auto correct = [&](Tensor place, Tensor more) {
            place.copy_(verbs[which] == "add" ? place + more : more);
        };
        if (verbs[which] == "none") continue;
        if (has_halves) {
            halves.each(target, step, which, 0, correct);
        } else {
            for (size_t n = 0; n + 1 < halves.ends.size(); n++) {
                const int64_t size = (halves.ends[n + 1] - halves.ends[n]) / 2, first = halves.ends[n] + which * size;
                correct(target.narrow(0, first, size), step.narrow(0, first, size));
            }
        }
    }
}

void nvte_extract_seed_and_offset(int64_t* rng_state_ptr, int captured, int64_t* seed_ptr, uint64_t seed_val,
                                  int64_t* offset_ptr, uint64_t offset_val, uint32_t offset_intragraph,
                                  cudaStream_t stream) {
    const char* name = "nvte_extract_seed_and_offset";
    refuse_if(captured, name, "a captured stream");
    const Call call(name, stream, std::vector<standin::Access>{{rng_state_ptr, 16, true, name}});
    rng_state_ptr[0] = static_cast<int64_t>(seed_val);
    rng_state_ptr[1] = static_cast<int64_t>(offset_val);
}

void nvte_convert_thd_to_bshd(NVTETensor tensor, NVTETensor cu_seqlens, NVTETensor new_tensor, int b, int max_seq_len,
                              cudaStream_t stream) {
    const Call call("nvte_convert_thd_to_bshd", stream, {tensor, cu_seqlens}, {new_tensor});
    const std::vector<int64_t> ends = numbers(cu_seqlens);
    const Tensor packed = view(tensor), padded = view(new_tensor);
    for (int64_t n = 0; n < b; n++)
        padded.select(0, n).narrow(0, 0, ends[n + 1] - ends[n]).copy_(packed.narrow(0, ends[n], ends[n + 1] - ends[n]));
}

void nvte_convert_bshd_to_thd(NVTETensor tensor, NVTETensor cu_seqlens, NVTETensor new_tensor, int t,
                              cudaStream_t stream) {
    const Call call("nvte_convert_bshd_to_thd", stream, {tensor, cu_seqlens}, {new_tensor});
    const std::vector<int64_t> ends = numbers(cu_seqlens);
    const Tensor padded = view(tensor), packed = view(new_tensor);
    for (int64_t n = 0; n < padded.size(0); n++)
        packed.narrow(0, ends[n], ends[n + 1] - ends[n]).copy_(padded.select(0, n).narrow(0, 0, ends[n + 1] - ends[n]));
}

// ---- optimizers

// The lists are gradients, parameters, first and second moments, and perhaps float32 copies of the parameters.
void nvte_multi_tensor_adam_cuda(int chunk_size, NVTETensor noop_flag, NVTETensor** tensor_lists,
                                 const size_t num_tensor_lists, const size_t num_tensors_per_list, const float lr,
                                 const float beta1, const float beta2, const float epsilon, const int step,
                                 const int mode, const int bias_correction, const float weight_decay,
                                 cudaStream_t stream) {
    const auto lists = lists_of(tensor_lists, num_tensor_lists, num_tensors_per_list);
    std::vector<NVTETensor> written;
    for (size_t n = 1; n < lists.size(); n++) written.insert(written.end(), lists[n].begin(), lists[n].end());
    const Call call("nvte_multi_tensor_adam_cuda", stream, lists[0], written);
    const double first = bias_correction ? 1 - std::pow(double{beta1}, step) : 1;
    const double second = bias_correction ? 1 - std::pow(double{beta2}, step) : 1;
    // Mode 0 adds the decay to the gradient (L2), mode 1 to the update (AdamW).
    const bool is_decoupled = mode == 1;
    for (size_t n = 0; n < num_tensors_per_list; n++) {
        if (!has_memory(lists[0][n])) continue;
        const bool has_copy = lists.size() == 5;
        Tensor gradient = wide(lists[0][n]);
        const Tensor parameter = wide(lists[has_copy ? 4 : 1][n]);
        if (!is_decoupled) gradient = gradient + weight_decay * parameter;
        const Tensor mean = beta1 * wide(lists[2][n]) + (1 - beta1) * gradient;
        const Tensor square = beta2 * wide(lists[3][n]) + (1 - beta2) * gradient * gradient;
        Tensor update = (mean / first) / ((square / second).sqrt() + epsilon);
        if (is_decoupled) update = update + weight_decay * parameter;
        const Tensor result = parameter - lr * update;
        store(lists[1][n], result);
        store(lists[2][n], mean);
        store(lists[3][n], square);
        if (has_copy) store(lists[4][n], result);
    }
}

void nvte_multi_tensor_l2norm_cuda(int chunk_size, NVTETensor noop_flag, NVTETensor** tensor_lists,
                                   const size_t num_tensor_lists, const size_t num_tensors_per_list,
                                   NVTETensor output, NVTETensor output_per_tensor, NVTETensor ret,
                                   NVTETensor ret_per_tensor, int per_tensor, int max_chunks_per_tensor,
                                   cudaStream_t stream) {
    l2_norm("nvte_multi_tensor_l2norm_cuda", noop_flag, tensor_lists, num_tensor_lists, num_tensors_per_list, ret,
            ret_per_tensor, nullptr, per_tensor, stream);
}

void nvte_multi_tensor_unscale_l2norm_cuda(int chunk_size, NVTETensor noop_flag, NVTETensor** tensor_lists,
                                           const size_t num_tensor_lists, const size_t num_tensors_per_list,
                                           NVTETensor output, NVTETensor output_per_tensor, NVTETensor ret,
                                           NVTETensor ret_per_tensor, NVTETensor inv_scale, int per_tensor,
                                           int max_chunks_per_tensor, cudaStream_t stream) {
    l2_norm("nvte_multi_tensor_unscale_l2norm_cuda", noop_flag, tensor_lists, num_tensor_lists, num_tensors_per_list,
            ret, ret_per_tensor, inv_scale, per_tensor, stream);
}

void nvte_multi_tensor_scale_cuda(int chunk_size, NVTETensor noop_flag, NVTETensor** tensor_lists,
                                  const size_t num_tensor_lists, const size_t num_tensors_per_list, float scale,
                                  cudaStream_t stream) {
    const auto lists = lists_of(tensor_lists, num_tensor_lists, num_tensors_per_list);
    std::vector<NVTETensor> written = lists[1];
    written.push_back(noop_flag);
    const Call call("nvte_multi_tensor_scale_cuda", stream, lists[0], written);
    for (size_t n = 0; n < num_tensors_per_list; n++) {
        if (!has_memory(lists[0][n])) continue;
        const Tensor values = wide(lists[0][n]);
        set_if_infinite(noop_flag, values);
        store(lists[1][n], values * scale);
    }
}

// ---- memory

void nvte_memset(void* ptr, int value, size_t size_in_bytes, cudaStream_t stream) {
    if (size_in_bytes && standin::fill(ptr, value, size_in_bytes, stream))
        fail("nvte_memset", standin::fault_text(standin::kIllegalAddress));
}

void nvte_zero_tensor(const NVTETensor tensor, cudaStream_t stream) {
    if (has_memory(tensor)) nvte_memset(nvte_tensor_data(tensor), 0, nvte_tensor_size_bytes(tensor), stream);
}

}  // extern "C"
