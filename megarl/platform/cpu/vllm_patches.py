"""Patches for vLLM 0.30 on a machine without CUDA: unpacked weights, gloo between ranks, unchanged process settings.

Without patches, vLLM copies weights into another format for its CPU kernels. New weights written into a parameter would
then have no effect, without an error. With the patches, linear layers and experts compute from the parameters. As a
side effect, float32 log-probs equal those of transformers. vLLM supports FP8 weights on few CPUs. The patches multiply
them by their scales, in the dtype of the activations, as vLLM's own CPU kernels do.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from megarl.platform.cpu import delta_net, media_libraries, speculative_decoding
from megarl.platform.imports import without

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables for vLLM's import, unless the user has set them: offline, no compilation, few messages."""


BLOCK_TOKENS = 32
"""Tokens per block of the KV cache. vLLM's default on a CPU is longer than a short prompt, whose prefix would never be
reused.
"""


def engine_arguments(max_model_len: int) -> dict[str, Any]:
    """Return vLLM's arguments that differ on a CPU."""
    return {
        "enforce_eager": True,
        "enable_sleep_mode": False,
        "moe_backend": "auto",
        # Prefill in one piece. After a partial prefill, seeded sampling rewinds its generator, but CPU generators
        # cannot.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_len, 8192),
        "block_size": BLOCK_TOKENS,
    }


@functools.cache
def install() -> None:
    """Install the patches once, before the first import of vLLM."""
    # First of all: torch and vLLM read these variables while they are imported.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor` is deprecated", FutureWarning)

    media_libraries.hide_broken()
    import torch._dynamo
    from vllm import _custom_ops
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers import utils as linear_layers
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as plain_experts
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8, CPUUnquantizedExperts
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils.torch_utils import LayerNameType
    from vllm.v1.worker.cpu_worker import CPUWorker

    # vLLM imports Ray for its own executor. megarl starts the ranks itself.
    with without("ray"):
        import vllm.v1.executor.ray_utils  # noqa: F401

    # If torch was imported earlier, it has missed TORCH_COMPILE_DISABLE.
    torch._dynamo.config.disable = True
    # The first delta-net layer registers its function as a torch operator, by its parameter types. Only vLLM has this
    # type.
    delta_net.attend.__annotations__["layer_name"] = LayerNameType
    replacements: list[tuple[Any, str, Any]] = [
        # The original packs each linear layer's weight, and replaces the parameter by an empty tensor.
        (linear_layers, "dispatch_cpu_unquantized_gemm", _keep_plain_weight),
        # The original reorders the experts' weights in place. Its kernel ignores the expert map of expert parallelism.
        (CPUUnquantizedExperts, "_supports_grouped_gemm", classmethod(lambda cls, moe_config: (True, None))),
        (CPUUnquantizedExperts, "process_weights_after_loading", lambda self, layer: None),
        (CPUUnquantizedExperts, "apply", _apply_plain_experts),
        # With LoRA, the original chooses Triton's kernels. There are none on a CPU.
        (
            plain_experts,
            "select_unquantized_moe_backend",
            _without_lora_kernels(plain_experts.select_unquantized_moe_backend),  # pyright: ignore[reportPrivateImportUsage]
        ),
        # The original kernels need a packed convolution weight, bfloat16, and head sizes of 64 or 128.
        (gdn_attention, "cpu_gdn_attention_core", delta_net.attend),
        # vLLM supports FP8 on few CPUs. The replacements below run on all.
        (CPUFp8BlockScaledMMKernel, "is_supported", classmethod(lambda cls, compute_capability=None: (True, None))),
        (
            CPUFp8BlockScaledMMKernel,
            "process_weights_after_loading",
            Fp8BlockScaledMMLinearKernel.process_weights_after_loading,
        ),
        (CPUFp8BlockScaledMMKernel, "apply_weights", _apply_blocks),
        (CPUExpertsFp8, "_supports_current_device", staticmethod(lambda: True)),
        (CPUExpertsFp8, "apply", _apply_quantised_experts),
        (cpu_moe, "prepare_fp8_moe_layer_for_cpu", lambda w13, w2: (w13, w2)),
        (
            _custom_ops,
            "cpu_attention_with_kv_cache",
            _with_sinks_of_any_type(_custom_ops.cpu_attention_with_kv_cache),
        ),
        # The originals copy an adapter's matrices once per token, and apply the last adapter to tokens without one.
        (PunicaWrapperCPU, "add_lora_linear", _add_adapters),
        # The original imports the model's class in a process without these patches.
        (registry, "_run_in_subprocess", lambda function: function()),
        # Use gloo. vLLM's shared-memory communicator waits busily, and its segments remain after a crash.
        (CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda self: False),
        # The original binds all memory of the process, including the trainer's, to one NUMA node.
        (torch.ops._C, "init_cpu_memory_env", lambda nodes: None),
        (CPUWorker, "init_device", _keep_thread_control(CPUWorker.init_device)),
        (RotaryEmbedding, "forward_cpu", _rotate_all_heads(RotaryEmbedding.forward_cpu)),
        (CpuPlatform, "check_and_update_config", _adapt_check(CpuPlatform.check_and_update_config)),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    speculative_decoding.install()
    # Not earlier: transformers, imported above, looks for torchvision once, and must not find it.
    media_libraries.provide_torchvision()


def _keep_plain_weight(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear


def _without_lora_kernels(select_backend):
    """Wrap vLLM's choice of expert kernels so that it ignores LoRA. Experts get no adapters here.

    With LoRA, vLLM 0.30 chooses kernels for adapters of experts, even if only attention has adapters.
    """

    @functools.wraps(select_backend)
    def select_without_lora(moe_config: Any) -> Any:
        plain = copy.copy(moe_config)
        plain.is_lora_enabled = False
        return select_backend(plain)

    return select_without_lora


def _with_sinks_of_any_type(kernel):
    """Wrap vLLM's attention on a CPU.

    Its kernel (0.30) reads attention sinks as bfloat16 only. Other sinks are rounded for the kernel. The output is then
    rescaled by means of the output without sinks.
    """

    @functools.wraps(kernel)
    def attend(*, query: torch.Tensor, output: torch.Tensor, s_aux: torch.Tensor | None, **kwargs: Any) -> None:
        """Attend with sinks [heads] in the kernel's bfloat16, then correct the output for their rounding."""
        if s_aux is None or s_aux.dtype == torch.bfloat16:
            kernel(query=query, output=output, s_aux=s_aux, **kwargs)
            return
        rounded, sinkless_output = s_aux.bfloat16(), torch.empty_like(output)
        kernel(query=query, output=output, s_aux=rounded, **kwargs)
        kernel(query=query, output=sinkless_output, s_aux=None, **kwargs)
        with_sinks, without_sinks = (
            output.view(query.shape).float(),
            sinkless_output.view(query.shape).float(),
        )
        # Without sinks the weights of all keys sum to one. With sinks they sum to this share.
        key_share = (with_sinks * without_sinks).sum(-1) / without_sinks.square().sum(-1).clamp(
            min=torch.finfo(torch.float32).tiny
        )
        # Weight of the sink relative to all keys, with the sink before its rounding.
        sink_ratio = (1 / key_share - 1) * (s_aux.float() - rounded.float()).exp()
        output.copy_((without_sinks / (1 + sink_ratio[..., None])).to(output.dtype).view(output.shape))

    return attend


def _rotate_all_heads(forward_cpu):
    """Wrap `RotaryEmbedding.forward_cpu`. Its kernel rotates only the first head of queries [tokens, heads, head_dim].

    vLLM's latent attention has queries of this shape. Other attention joins the last two dimensions.
    """

    @functools.wraps(forward_cpu)
    def rotate(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        forward = self.forward_native if query.dim() == 3 else functools.partial(forward_cpu, self)
        return forward(positions, query, key)

    return rotate


def _adapt_check(check_and_update_config):
    """Wrap `CpuPlatform.check_and_update_config`.

    Choose the plain backend for latent attention, and keep LD_PRELOAD. On processors with AMX, vLLM's default replaces
    the weight of `kv_b_proj` by an empty tensor. vLLM 0.30 adds libraries to LD_PRELOAD for worker processes. megarl
    has none, and other programs would report an error if the path has a blank.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    @functools.wraps(check_and_update_config)
    def check_and_restore(vllm_config) -> None:
        """Choose the CPU's kernel for latent attention, and undo vLLM's change of LD_PRELOAD."""
        if vllm_config.model_config is not None and vllm_config.model_config.use_mla:
            vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
        preloaded = os.environ.get("LD_PRELOAD")
        check_and_update_config(vllm_config)
        if preloaded is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = preloaded

    return staticmethod(check_and_restore)


def _keep_thread_control(init_device):
    """Wrap `CPUWorker.init_device`, which replaces `torch.set_num_threads`, and restore this function afterwards."""

    @functools.wraps(init_device)
    def initialise(worker) -> None:
        set_num_threads = torch.set_num_threads
        try:
            init_device(worker)
        finally:
            torch.set_num_threads = set_num_threads

    return initialise


def _add_adapters(
    punica: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **kwargs: Any,
) -> None:
    """Add the outputs of the tokens' adapters for `x` [tokens, in] to `y` [tokens, out].

    Each output slice has a slot A [adapters, 1, rank, in] and a slot B [adapters, 1, part of out, rank].
    """
    adapters = punica.token_lora_indices
    # -1 means no adapter.
    for adapter in adapters.unique().tolist():
        if adapter < 0:
            continue
        rows = (adapters == adapter).nonzero().flatten()
        parts = [
            F.linear(F.linear(x[rows], a[adapter, 0]) * scale, b[adapter, 0])
            for a, b in zip(lora_a_stacked, lora_b_stacked, strict=True)
        ]
        y.index_add_(0, rows, torch.cat(parts, dim=-1))


def _apply_blocks(kernel, layer, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """Return the output [..., out] of a linear layer with FP8 weights in blocks of 128 x 128.

    Shapes: x [..., in], bias [out], layer.weight [out, in], layer.weight_scale_inv [out / 128, in / 128].
    """
    return F.linear(x, _dequantise(layer.weight, layer.weight_scale_inv, x.dtype), bias)


def _apply_quantised_experts(
    experts, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *args: Any, **kwargs
) -> None:
    """Write the output of an MoE layer with FP8 weights into `output`. `experts` holds the weights' scales.

    Shapes as in `_apply_plain_experts`.
    """
    plain_w1 = _dequantise(w1, experts.w1_scale, hidden_states.dtype)
    plain_w2 = _dequantise(w2, experts.w2_scale, hidden_states.dtype)
    _apply_plain_experts(experts, output, hidden_states, plain_w1, plain_w2, *args, **kwargs)


def _dequantise(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: int = 128) -> torch.Tensor:
    """Return FP8 weights [..., out, in] times their scales [..., out / 128, in / 128] (sizes rounded up)."""
    wide = scale.repeat_interleave(block, -2).repeat_interleave(block, -1)
    return (weight.float() * wide[..., : weight.shape[-2], : weight.shape[-1]]).to(dtype)


def _silu_gated(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [tokens, intermediate], from x [tokens, 2 * intermediate]: gates, then ups."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _clamped_gated(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """Return gpt-oss's clamped SwiGLU, [tokens, intermediate], from x [tokens, 2 * intermediate].

    Gates and ups alternate in `x`. vLLM 0.30 has fixed values of alpha and limit.
    """
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


_ACTIVATIONS = {"silu": _silu_gated, "swigluoai": _clamped_gated}
"""Activations of experts on a CPU, by vLLM's name."""


def _apply_plain_experts(
    experts,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    *args: Any,
    apply_router_weight_on_input: bool = False,
    **kwargs: Any,
) -> None:
    """Write the output of an MoE layer into `output`, with one matrix product per local expert.

    Shapes: output and hidden_states [tokens, hidden_size], w1 [experts, 2 * intermediate, hidden_size], w2 [experts,
    hidden_size, intermediate], topk_weights and topk_ids [tokens, top_k]. `experts` may hold biases [experts, rows].
    Raises NotImplementedError for activations without an entry in `_ACTIVATIONS`, and for router weights on the input.
    """
    if activation.value not in _ACTIVATIONS or apply_router_weight_on_input:
        raise NotImplementedError(
            f"vLLM on CPU: experts with {activation.value} or router weights on the input are not supported; supported "
            f"are {', '.join(_ACTIVATIONS)}"
        )
    activate = _ACTIVATIONS[activation.value]
    no_biases = [None] * len(w1)
    biases1 = no_biases if experts.w1_bias is None else experts.w1_bias
    biases2 = no_biases if experts.w2_bias is None else experts.w2_bias
    output.zero_()
    for expert in range(global_num_experts):
        # The map has -1 for experts on other ranks.
        local_expert = expert if expert_map is None else int(expert_map[expert])
        tokens, slots = torch.where(topk_ids == expert)
        if local_expert < 0 or len(tokens) == 0:
            continue
        gated = activate(F.linear(hidden_states[tokens], w1[local_expert], biases1[local_expert]))
        values = F.linear(gated, w2[local_expert], biases2[local_expert])
        output.index_add_(0, tokens, (values * topk_weights[tokens, slots, None]).to(output.dtype))
