"""Arithmetic of the batch-invariant modes of vLLM 0.30 and 0.32 and Megatron-Core 0.16.1 and 0.19.2, on NVIDIA GPUs.

vLLM's mode is the environment variable VLLM_BATCH_INVARIANT=1. Megatron's mode has two parts: the field
`batch_invariant_mode`, and the function `enable_batch_invariant_mode` that replaces operators of the whole process.
megarl enables neither. This table was read from sources; nothing of it has run on a GPU. `preflight.model.exactness_on_gpus`
refuses every operator in the rows "no" by name.

| operator | vLLM | Megatron-Core | equal |
|---|---|---|---|
| linear layer, bfloat16 | Triton, tiles 128 x 128, K in ascending blocks of 64, float32 accumulator, rounded once; bias added later (0.30) or to the accumulator (0.32) | the same kernel and tiles, bias added later | without bias |
| the same, shapes in vLLM's tuned table | K in blocks of 32, 64 or 128, by architecture and shape | K in blocks of 64 | blocks of 64 only |
| `torch.mm` | Triton on compute capability 8.x, cuBLASLt without split-K from 9.0 on | Triton | 8.x only |
| `torch.bmm` | Triton, as the linear layer | not replaced | no |
| mean | Triton, float32, blocks of 1024 | the same kernel | yes |
| RMSNorm | sum as in mean, then 1 / sqrt, one rounding | mean, then rsqrt, one rounding | no |
| RMSNorm inside a linear layer | does not exist | 0.16.1: Transformer Engine's own; 0.19.2: as RMSNorm | no |
| residual addition and RMSNorm | one CUDA kernel; its source is not in the wheel | sum rounded to bfloat16, then RMSNorm | no |
| rotary embedding | CUDA kernel, bfloat16 cosines and sines | Transformer Engine's, or torch with a rounding per operation | no |
| attention | vLLM's build of FlashAttention 2 or 3 on pages, one split (4 becomes 2); Triton; Flex | Transformer Engine's FlashAttention without pages, one split | no |
| SwiGLU | CUDA kernel; its source is not in the wheel | compiled by torch.compile | no |
| softmax | torch (0.30), Triton (0.32) | not replaced | no |
| log_softmax of float32 logits | Triton, blocks of 1024, in the sampler too | the same kernel | yes |
| sum over tensor-parallel ranks | NCCL with one channel: a tree, protocol Simple | NCCL as the process has it; reduce-scatter with sequence parallelism | no |
| mixture of experts | Triton, tiles 64 x 64 x 32 | grouped products not replaced | no |
| LoRA | no split of K, but blocks of 256 below 128 tokens, else 32 | merged into the weights, or added to their products | no |
| FP8 weights | converted to bfloat16, or CUTLASS | refused by the dtype check | no |
| compiled model | custom operators off, so Inductor makes norms and SwiGLU | not compiled | no |
Triton's interpreter ran three kernels of vLLM 0.30 and Megatron-Core 0.16.1 on a CPU. Products with equal blocks of K,
log_softmax, and the sampler's log-probs were bit-equal. Blocks of 64 and 128 differed in 1,104 of 1,320 float32
elements. The interpreter rounds like NumPy, so a GPU may differ.
"""  # noqa: E501

from __future__ import annotations

from tests.guards.facts import Source

_VLLM = "model_executor/determinism/batch_invariant.py"
_MEGATRON = "core/transformer/custom_layers/batch_invariant_kernels.py"

VLLM = (
    Source(
        "vllm", _VLLM, "init_batch_invariance",
        "if envs.VLLM_BATCH_INVARIANT: resolve_tuned_matmul_configs() override_envs_for_invariance() "
        "enable_batch_invariant_mode()",
        "one environment variable enables vLLM's batch-invariant mode",
    ),
    Source(
        "vllm", "v1/worker/gpu_worker.py", "init_worker_distributed_environment", "init_batch_invariance()",
        "vLLM's mode begins in the worker, before it makes its process groups",
    ),
    Source(
        "vllm", "model_executor/layers/linear.py", "UnquantizedLinearMethod.apply",
        "if envs.VLLM_BATCH_INVARIANT and ( current_platform.is_cuda_alike() or current_platform.is_xpu() ): "
        "return linear_batch_invariant(x, layer.weight, bias)",
        "vLLM's linear layers are Triton products on every GPU",
    ),
    Source(
        "vllm", _VLLM, "linear_batch_invariant", "output = matmul_batch_invariant(input, weight.t())",
        "vLLM's linear layer multiplies by the transposed weight, in place",
        newer_text="input.reshape(-1, input.shape[-1]), weight.t(), bias=bias",
    ),
    Source(
        "vllm", _VLLM, "matmul_persistent", "**_get_matmul_config(M, N, K, dtype, configs[dtype]),",
        "vLLM's tuned table replaces the tiles of its Triton product",
    ),
    Source(
        "vllm", "model_executor/determinism/batch_invariant_configs.py", "_get_matmul_config",
        "shape_config = device_configs.get((N, K)) if shape_config is None: return default",
        "a shape outside vLLM's tuned table has the usual tiles",
    ),
    Source(
        "vllm", "model_executor/determinism/batch_invariant_configs.py", "_get_matmul_config",
        '"BLOCK_SIZE_K": shape_config.block_k,', "the number of tokens does not change the blocks of K",
    ),
    Source(
        "vllm", _VLLM, "enable_batch_invariant_mode",
        'else: # Hopper (SM90) and Blackwell (SM100): the only source of batch # variance is split-k, which we '
        'disable via the cuBLAS workspace # config. os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8" '
        'os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"',
        "torch.mm is cuBLASLt's product from compute capability 9.0 on, without split-K",
    ),
    Source(
        "vllm", _VLLM, "enable_batch_invariant_mode", 'torch.backends.cuda.preferred_blas_library(backend="cublaslt")',
        "vLLM's mode chooses cuBLASLt for the whole process",
    ),
    Source(
        "vllm", _VLLM, "init_batch_invariance", 'torch.backends.cuda.matmul.fp32_precision = "ieee"',
        "vLLM's mode disables TF32 for the whole process",
    ),
    Source(
        "vllm", _VLLM, "_rms_norm_kernel", "rms = tl.sqrt(mean_sq + eps) inv_rms = 1.0 / rms",
        "vLLM's RMSNorm takes a square root and then its reciprocal",
    ),
    Source(
        "vllm", _VLLM, "_rms_norm_kernel",
        "output_f32 = vals_f32 * inv_rms if HAS_WEIGHT: weight = tl.load(weight_ptr + col_idx, mask=mask, other=1.0) "
        "output_f32 = output_f32 * weight.to(tl.float32) output = output_f32.to(vals.dtype)",
        "vLLM's RMSNorm multiplies by the weight in float32 and rounds once",
    ),
    Source(
        "vllm", _VLLM, "rms_norm_batch_invariant",
        "ops.fused_add_rms_norm(input, residual, weight, eps) return input, residual",
        "vLLM's residual addition and norm are one CUDA kernel, not the Triton norm",
    ),
    Source(
        "vllm", "model_executor/layers/layernorm.py", "RMSNorm.forward_cuda",
        "if envs.VLLM_BATCH_INVARIANT:", "only the CUDA form of vLLM's RMSNorm is batch-invariant",
    ),
    Source(
        "vllm", "model_executor/layers/layernorm.py", "RMSNorm.forward_native", "BATCH_INVARIANT",
        "vLLM's native RMSNorm, used in compiled models, has no batch-invariant form", False,
    ),
    Source(
        "vllm", "config/vllm.py", "VllmConfig.__post_init__",
        'self.compilation_config.backend == "inductor" and self.compilation_config.mode != CompilationMode.NONE ): '
        'self.compilation_config.custom_ops.append("none")',
        "a compiled vLLM model has native norms and activations, made by Inductor",
    ),
    Source(
        "vllm", "ir/ops/layernorm.py", "rms_norm", "x = x.to(weight.dtype) * weight",
        "vLLM's native RMSNorm rounds before it multiplies by the weight",
    ),
    Source(
        "vllm", "model_executor/layers/rotary_embedding/base.py", "RotaryEmbeddingBase._match_cos_sin_cache_dtype",
        "cos_sin_cache = cos_sin_cache.to(query.device, dtype=query.dtype)",
        "vLLM rounds cosines and sines to the model's dtype",
    ),
    Source(
        "vllm", "model_executor/layers/rotary_embedding/base.py", "RotaryEmbedding.forward_cuda",
        "ops.rotary_embedding(", "vLLM rotates queries and keys by a CUDA kernel",
    ),
    Source(
        "vllm", "model_executor/layers/activation.py", "SiluAndMul.forward_cuda", "self.op(out, x)",
        "vLLM's SwiGLU is a CUDA kernel",
    ),
    Source(
        "vllm", "v1/attention/backends/fa_utils.py", "get_flash_attn_version",
        "if envs.VLLM_BATCH_INVARIANT and fa_version == 4:", "vLLM replaces FlashAttention 4 by FlashAttention 2",
    ),
    Source(
        "vllm", "v1/attention/backends/fa_utils.py", "get_flash_attn_version",
        "if device_capability.major == 9 and is_fa_version_supported(3): # Hopper (SM90): prefer FA3 fa_version = 3",
        "vLLM has FlashAttention 3 on Hopper",
    ),
    Source(
        "vllm", "v1/attention/backends/flash_attn.py", "FlashAttentionMetadataBuilder.build",
        "if envs.VLLM_BATCH_INVARIANT: max_num_splits = 1", "vLLM's FlashAttention does not split the keys",
    ),
    Source(
        "vllm", "v1/attention/backend.py", "AttentionBackend.supports_batch_invariance", "return False",
        "an attention backend of vLLM is batch-invariant only if it says so",
    ),
    *(
        Source(
            "vllm", f"v1/attention/backends/{file}.py", f"{name}.supports_batch_invariance", "return True",
            f"vLLM's {name} is batch-invariant",
        )
        for file, name in (
            ("flash_attn", "FlashAttentionBackend"), ("triton_attn", "TritonAttentionBackend"),
            ("flex_attention", "FlexAttentionBackend"), ("mla/triton_mla", "TritonMLABackend"),
            ("mla/flashattn_mla", "FlashAttnMLABackend"),
        )
    ),
    Source(
        "vllm", "v1/attention/backends/flashinfer.py", "FlashInferBackend", "supports_batch_invariance",
        "vLLM refuses FlashInfer's attention in batch-invariant mode", False,
    ),
    Source(
        "vllm", "config/vllm.py", "VllmConfig.__post_init__", "self.model_config.disable_cascade_attn = True",
        "vLLM 0.30 disables cascade attention in batch-invariant mode", versions=("0.30.0",),
    ),
    Source(
        "vllm", "config/model.py", "ModelConfig", "disable_cascade_attn: bool = True",
        "cascade attention is off by default in vLLM", versions=("0.32.0",),
    ),
    Source(
        "vllm", "config/parallel.py", "ParallelConfig._verify_args",
        "if envs.VLLM_BATCH_INVARIANT: self.disable_custom_all_reduce = True",
        "vLLM 0.30 sums over ranks by NCCL alone", versions=("0.30.0",),
    ),
    Source(
        "vllm", _VLLM, "override_envs_for_invariance", 'os.environ["VLLM_CUSTOM_ALLREDUCE_ALGO"] = "1stage"',
        "vLLM 0.32 sums small tensors over ranks by its own kernel", versions=("0.32.0",),
    ),
    *(
        Source(
            "vllm", _VLLM, "override_envs_for_invariance", f'os.environ["{name}"] = "{value}"',
            f"vLLM's mode sets {name}={value} for the communicators of the whole process",
            newer_text=f'"{name}": "{newer or value}"',
        )
        for name, value, newer in (
            ("NCCL_ALGO", "allreduce:tree", "ring,tree;allreduce:tree"), ("NCCL_PROTO", "Simple", ""),
            ("NCCL_MIN_NCHANNELS", "1", ""), ("NCCL_MAX_NCHANNELS", "1", ""), ("NCCL_NVLS_ENABLE", "0", ""),
            ("NCCL_COLLNET_ENABLE", "0", ""), ("NCCL_NTHREADS", "1", ""),
        )
    ),
    Source(
        "vllm", "distributed/device_communicators/cuda_communicator.py", "CudaCommunicator.__init__",
        "envs.VLLM_ALLREDUCE_USE_FLASHINFER and not envs.VLLM_BATCH_INVARIANT",
        "vLLM does not sum over ranks by FlashInfer",
    ),
    Source(
        "vllm", "config/vllm.py", "enable_allreduce_rms_fusion", "if envs.VLLM_BATCH_INVARIANT: return False",
        "vLLM does not fuse the sum over ranks with the norm",
    ),
    Source(
        "vllm", "model_executor/layers/fused_moe/fused_moe.py", "get_default_config",
        'if envs.VLLM_BATCH_INVARIANT: return { "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, '
        '"GROUP_SIZE_M": 8, "SPLIT_K": 1, }',
        "vLLM's experts have one tile size",
    ),
    Source(
        "vllm", "lora/ops/triton_ops/utils.py", "get_lora_op_configs", "if is_batch_invariant: split_k = 1",
        "vLLM's LoRA does not split K",
    ),
    Source(
        "vllm", "lora/ops/triton_ops/utils.py", "get_lora_op_configs", '"block_k": 256 if batch < 128 else 32,',
        "the blocks of K in vLLM's LoRA depend on the number of tokens, so LoRA is not batch-invariant",
    ),
    Source(
        "vllm", "model_executor/layers/quantization/online/fp8.py", "Fp8PerTensorOnlineLinearMethod.apply",
        "if envs.VLLM_BATCH_INVARIANT:", "vLLM multiplies FP8 weights otherwise in batch-invariant mode",
    ),
    Source(
        "vllm", _VLLM, "override_envs_for_invariance", 'os.environ["VLLM_USE_AOT_COMPILE"] = "0"',
        "vLLM's mode switches ahead-of-time compilation off, not compilation",
    ),
    Source(
        "vllm", "v1/sample/sampler.py", "Sampler.compute_logprobs", "logits.log_softmax(dim=-1, dtype=torch.float32)",
        "the older sampler's log-probs are the replaced log_softmax, in float32",
    ),
)  # fmt: skip

MEGATRON = (
    Source(
        "megatron", "core/transformer/transformer_config.py", "TransformerConfig.__post_init__",
        "if self.batch_invariant_mode: assert ( self.attention_backend == AttnBackend.flash )",
        "Megatron's mode requires FlashAttention",
    ),
    Source(
        "megatron", "core/extensions/transformer_engine.py", "TEDotProductAttention.__init__",
        "1 if (num_splits is None and self.config.batch_invariant_mode) else num_splits",
        "Megatron's attention does not split the keys",
    ),
    Source(
        "megatron", "core/transformer/attention.py", "Attention.flash_decode_and_prefill",
        '"Batch invariant mode is not supported for flash attention 2"',
        "Megatron's own inference requires FlashAttention 3",
    ),
    Source(
        "megatron", "core/transformer/transformer_config.py", "", "enable_batch_invariant_mode",
        "Megatron's field replaces no operator: a program calls enable_batch_invariant_mode itself", False,
    ),
    *(
        Source(
            "megatron", _MEGATRON, "enable_batch_invariant_mode", f'_batch_invariant_LIB.impl("aten::{name}",',
            f"Megatron's mode replaces {name} of the whole process, as vLLM's does; the later one wins",
        )
        for name in ("mm", "addmm", "_log_softmax", "mean.dim")
    ),
    *(
        Source(
            "megatron", _MEGATRON, "enable_batch_invariant_mode", f'"aten::{name}"',
            f"Megatron's mode does not replace {name}", False,
        )
        for name in ("bmm", "softmax", "_softmax", "matmul", "linear")
    ),
    Source(
        "megatron", _MEGATRON, "_te_patch_for_batch_invariant", "te_linear_mod.general_gemm = _te_general_gemm_patched",
        "Megatron's mode replaces the products of Transformer Engine's linear layers",
    ),
    Source(
        "megatron", _MEGATRON, "", "general_grouped_gemm", "Megatron's mode leaves the products of experts", False,
    ),
    Source(
        "megatron", _MEGATRON, "BatchInvariantTEGemmFn.forward",
        "base_2d = matmul_persistent(opB_2d, opA, bias=None)", "Megatron's linear layer is one Triton product",
    ),
    Source(
        "megatron", _MEGATRON, "BatchInvariantTEGemmFn.forward", "if bias is not None: out = out + bias",
        "Megatron adds the bias to the rounded product",
    ),
    Source(
        "megatron", _MEGATRON, "_te_general_gemm_patched", "accumulate",
        "Megatron's product ignores `accumulate`: with fused accumulation a weight's gradient is that of the last "
        "microbatch",
        False,
    ),
    Source(
        "megatron", _MEGATRON, "_te_general_gemm_patched", "if out is not None: out.copy_(result)",
        "Megatron's product overwrites its output",
    ),
    Source(
        "megatron", _MEGATRON, "_te_general_gemm_patched",
        "if extra_output is not None or ub is not None or ub_type is not None or bulk_overlap: raise RuntimeError(",
        "Megatron's mode refuses products overlapped with communication",
    ),
    Source(
        "megatron", _MEGATRON, "_te_general_gemm_patched", "if not _is_supported_dtype_for_bik(A.dtype)",
        "Megatron's mode takes float16, bfloat16 and float32 only",
    ),
    Source(
        "megatron", _MEGATRON, "BatchInvariantRMSNormFn.forward",
        "ms = mean_dim(x_fp32 * x_fp32, dim=-1, keepdim=True) rsigma = torch.rsqrt(ms + eps) "
        "out_fp32 = (x_fp32 * rsigma) * w_fp32 out = out_fp32.to(x_dtype)",
        "Megatron's RMSNorm multiplies by rsqrt in float32 and rounds once",
    ),
    Source(
        "megatron", _MEGATRON, "BatchInvariantRMSNormFn.forward", "w_fp32 = weight.to(",
        "Megatron's RMSNorm ignores zero_centered_gamma in the forward pass",
    ),
    Source(
        "megatron", _MEGATRON, "_te_patch_for_batch_invariant", "apply_normalization",
        "Megatron 0.16.1 leaves the norm inside Transformer Engine's linear layers", False, versions=("0.16.1",),
    ),
    Source(
        "megatron", _MEGATRON, "_te_patch_for_batch_invariant",
        "mod.apply_normalization = _te_apply_normalization_patched",
        "Megatron 0.19 replaces the norm inside Transformer Engine's linear layers", versions=("0.19.2",),
    ),
    Source(
        "megatron", "core/fusions/fused_bias_dropout.py", "_bias_dropout_add_func", "out = residual + out",
        "Megatron rounds the sum of residual and output before the norm",
    ),
    Source(
        "megatron", "core/models/common/embeddings/rope_utils.py", "_apply_rotary_pos_emb_bshd",
        "t = (t * cos_) + (_rotate_half(t, rotary_interleaved) * sin_)",
        "Megatron's unfused rotary embedding rounds each product and the sum",
    ),
    Source(
        "megatron", "core/fusions/fused_bias_swiglu.py", "", "@jit_fuser def swiglu(y):",
        "Megatron's SwiGLU is compiled",
    ),
    Source(
        "megatron", "core/jit.py", "enable_jit_fuser", "jit_fuser = torch.compile",
        "Megatron compiles with Inductor, which keeps intermediate results in float32",
    ),
)  # fmt: skip

TRANSFORMER_ENGINE = (
    Source(
        "transformer_engine", "pytorch/cpp_extensions/gemm.py", "general_gemm", "accumulate: bool = False",
        "Transformer Engine adds weight gradients by the argument `accumulate`",
    ),
    Source(
        "transformer_engine", "pytorch/module/layernorm_linear.py", "", "from ._common import apply_normalization",
        "a linear layer with a norm calls another function than RMSNorm",
    ),
    Source(
        "transformer_engine", "pytorch/module/_common.py", "", '"RMSNorm": tex.rmsnorm_fwd,',
        "the norm inside a linear layer is Transformer Engine's CUDA kernel",
    ),
)  # fmt: skip

TORCH = (
    Source(
        "torch", "library.py", "Library.impl", "if (not allow_override) and key in _impls:",
        "an operator of torch may be replaced twice without an error: vLLM's and Megatron's modes exclude each other",
    ),
)  # fmt: skip

SOURCES = (*VLLM, *MEGATRON, *TRANSFORMER_ENGINE, *TORCH)
