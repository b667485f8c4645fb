"""Patches of torch that let the unmodified Megatron-Core 0.16.1 run on a CPU over gloo.

Megatron uses the device "cuda", CUDA's random state, and tensor types `torch.cuda.*`. Without CUDA the patches replace
them by the CPU's. No file of Megatron is edited.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megarl.platform import device
from megarl.platform.cpu import absent_triton, bfloat16_products
from megarl.platform.imports import without

FACTORIES = ("empty", "empty_like", "full", "ones", "tensor", "zeros")
"""torch functions that Megatron calls with device="cuda"."""

_MARK = "_megarl"
"""Marks the patched `Tensor.cuda`, so that patches are installed only once."""


class _NoStream(contextlib.nullcontext[None]):
    """CUDA stream or event on a CPU. Its methods do nothing, because all work is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def record(self, *args: Any) -> None: ...

    wait = wait_stream = wait_event = synchronize = record

    def record_event(self, *args: Any) -> _NoStream:
        return self


def install() -> None:
    """Install the patches once, before Megatron is imported."""
    if hasattr(torch.Tensor.cuda, _MARK):
        return
    # Normally the CPU, unless a tool replaced `device.current`.
    rank_device = device.current()
    # Megatron's jit_fuser is torch.compile. On a CPU it would compile C++ code for each tiny function.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    warnings.filterwarnings("ignore", r"(?s).*(Transformer Engine|Apex).* not installed.*", UserWarning)
    # `with torch.device(...)` recognises factories by identity. Cache the originals before the patches, which still
    # call them.
    _device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_device(getattr(torch, name), rank_device))
    _replace_tensor_methods(rank_device)
    torch.cuda.current_device = lambda: rank_device
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device="cpu": torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device="cpu": torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: _NoStream()
    torch.cuda.stream = lambda stream: _NoStream()
    absent_triton.install()
    bfloat16_products.install()

    # Megatron imports wandb for its own inference engine. No rank logs to it.
    with without("wandb"):
        import megatron.core.tensor_parallel.random as megatron_random

    # Megatron warns if its GPU random context changes the CPU's random state. Here they are the same.
    megatron_random.logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    _adapt_experts(rank_device)


def _adapt_experts(rank_device: torch.device) -> None:
    """Patch Megatron's mixture of experts for a CPU: CUDA streams, Transformer Engine, collectives of unequal sizes."""
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # vLLM 0.30, imported later, replaces torch.cuda's stream class by one without events: create the stream now.
    dispatcher: Any = token_dispatcher.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = _NoStream()
    # Without Transformer Engine, the module lacks this name but still looks it up.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not torch.is_tensor(tensor):
            return tensor
        return tensor.cpu().numpy() if as_numpy else tensor.cpu()

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    if rank_device.type != "cpu":
        return

    # gloo gathers and scatters only equal blocks, so pad each rank's block to the largest size.
    def gather_unequal(input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        """Gather blocks of different lengths: pad them, because gloo needs equal ones."""
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        padded_blocks = gather(padded, group).split(max(sizes))
        return torch.cat([block[:size] for block, size in zip(padded_blocks, sizes, strict=True)])

    def reduce_scatter_unequal(
        input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        """Sum and scatter blocks of different lengths, padded for gloo."""
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        padded = input_.new_zeros(len(sizes), max(sizes), *input_.shape[1:])
        for block, padded_block in zip(input_.split(sizes), padded, strict=True):
            padded_block[: len(block)] = block
        return reduce_scatter(padded.flatten(0, 1), group)[: sizes[group.rank()]]

    mappings._gather_along_first_dim = gather_unequal
    mappings._reduce_scatter_along_first_dim = reduce_scatter_unequal


def adapt_hybrid_optimizer() -> None:
    """Patch Megatron's `HybridDeviceOptimizer`, which offloads parameters to the host, for a CPU.

    The original recognises parameters on the device by `is_cuda`. Here all parameters that are not offloaded count as
    on the device.
    """
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    hybrid: Any = HybridDeviceOptimizer
    hybrid._get_sub_optimizer_param_groups = _split_parameters


def _split_parameters(self: Any, offload_fraction: float) -> tuple[Any, ...]:
    """Replacement of the method of `HybridDeviceOptimizer` that splits parameters.

    Returns, as the original: host groups, device groups, host copies by parameter, parameters by host copy, and float32
    copies by parameter. `offload_fraction` is the fraction of elements to offload.
    """
    threshold = offload_fraction * sum(p.numel() for group in self.param_groups for p in group["params"])
    numel = 0
    on_host: dict[Any, Any] = {}
    in_float32: dict[Any, Any] = {}
    groups: tuple[list[Any], list[Any]] = ([], [])
    for group in self.param_groups:
        parts_of_group: tuple[list[Any], list[Any]] = ([], [])
        for parameter in group["params"]:
            is_on_host, stepped_parameter = numel < threshold, parameter
            if is_on_host:
                stepped_parameter = parameter.detach().clone()
                numel += parameter.numel()
            if self.param_update_in_fp32 and parameter.dtype != torch.float32:
                stepped_parameter = stepped_parameter.detach().clone().float()
                in_float32[parameter] = stepped_parameter
            if is_on_host:
                on_host[parameter] = stepped_parameter
            parts_of_group[0 if is_on_host else 1].append(stepped_parameter)
        for target_groups, group_part in zip(groups, parts_of_group, strict=True):
            if group_part:
                target_groups.append({**group, "params": group_part})
    return *groups, on_host, {copy: parameter for parameter, copy in on_host.items()}, in_float32


def _on_device(factory: Any, rank_device: torch.device) -> Any:
    """Return a tensor factory that replaces device "cuda" by `rank_device` and pins no memory."""

    @functools.wraps(factory)
    def make_on_rank_device(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = rank_device
        # Without CUDA, torch cannot pin memory.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make_on_rank_device


def _replace_tensor_methods(rank_device: torch.device) -> None:
    """Let `Tensor.cuda` move tensors to `rank_device`, and `Tensor.type` name them like CUDA tensors."""
    type_of = torch.Tensor.type

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.to(rank_device)

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizer and gradient clipping compare the type with the string `torch.cuda.FloatTensor`.
        if args or kwargs:
            return type_of(self, *args, **kwargs)
        return "torch.cuda." + type_of(self).rpartition(".")[2]

    setattr(cuda, _MARK, True)
    torch.Tensor.cuda = cuda
    torch.Tensor.type = type_name
