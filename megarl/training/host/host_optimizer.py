"""Adam with state and step on the CPU for a fraction of the parameters, to save device memory.

Megatron's `HybridDeviceOptimizer` copies their gradients to the host. On the host, torch's fused Adam steps on float32
copies of the weights; the new weights are copied back. This module uses the class's internals (Megatron-Core 0.16.1,
optimizer/cpu_offloading).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from megarl.platform import libraries

_SETTINGS = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
)
"""Settings of `HybridDeviceOptimizer` in its parameter groups, in addition to Adam's."""


def set_host_fraction(settings: OptimizerConfig, fraction: float) -> None:
    """Set the fraction of the optimizer in host memory. 0 changes nothing."""
    if not fraction:
        return
    libraries.prepare_hybrid_optimizer()
    settings.optimizer_cpu_offload = True
    settings.optimizer_offload_fraction = fraction
    settings.overlap_cpu_optimizer_d2h_h2d = True
    # Page-locked memory makes copies to and from the GPU asynchronous; without a GPU it cannot be allocated.
    settings.pin_cpu_grads = torch.cuda.is_available()
    # Otherwise the float32 main weights would be on the device, in addition to their copies on the host. As an argument
    # of the constructor, this setting would require Transformer Engine's version even without Transformer Engine.
    settings.use_precision_aware_optimizer = True
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    settings.store_param_remainders = False


def is_hybrid(optimizer: Any) -> bool:
    return isinstance(optimizer.optimizer, HybridDeviceOptimizer)


def allocate_moments(optimizer: Any) -> None:
    """Allocate an optimizer's state as zeros before its first step. Megatron's `dummy_step` would change weights."""
    inner_optimizer = optimizer.optimizer
    for sub_optimizer in inner_optimizer.sub_optimizers:
        for parameter in _parameters(sub_optimizer):
            state = sub_optimizer.state[parameter]
            if "exp_avg" not in state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                if _is_torch(sub_optimizer):
                    state["step"] = torch.zeros((), device=parameter.device)
    inner_optimizer._sync_sub_optimizers_state_to_hdo()


def set_step(optimizer: Any, step: int) -> None:
    """Set Adam's step count in all parts of the optimizer: in each parameter's state for torch, else in the groups."""
    for sub_optimizer in optimizer.optimizer.sub_optimizers:
        if _is_torch(sub_optimizer):
            for parameter in _parameters(sub_optimizer):
                sub_optimizer.state[parameter]["step"] = torch.tensor(float(step), device=parameter.device)
        else:
            for group in sub_optimizer.param_groups:
                group["step"] = step
    optimizer.optimizer._sync_sub_optimizers_state_to_hdo()


def without_hybrid_settings(state: dict[str, Any]) -> dict[str, Any]:
    """Return a distributed optimizer's state without the settings of `HybridDeviceOptimizer`."""
    inner_state = state["optimizer"]
    # A checkpoint must not depend on the fraction in host memory: a later run may use another.
    groups = [
        {name: value for name, value in group.items() if name not in _SETTINGS} for group in inner_state["param_groups"]
    ]
    return {**state, "optimizer": {**inner_state, "param_groups": groups}}


def _parameters(sub_optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in sub_optimizer.param_groups for parameter in group["params"]]


def _is_torch(sub_optimizer: Any) -> bool:
    return isinstance(sub_optimizer, torch.optim.Adam | torch.optim.AdamW)
