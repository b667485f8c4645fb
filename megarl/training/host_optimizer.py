"""Adam whose state lies in host memory, for a fraction of the parameters, and which works there.

Megatron's `HybridDeviceOptimizer`: gradients of that fraction go to the host, torch's fused Adam steps there on float32
copies of the weights, and the new weights come back. The other parameters have main weights and moments on the device,
as without it. What is said here of its inside was read in Megatron-Core 0.16.1, optimizer/cpu_offloading.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from megarl.platform import megatron_on_cpu

_SETTINGS = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
)
"""Settings of its own in its groups of parameters, beside those of Adam."""


def set_host_fraction(settings: OptimizerConfig, fraction: float) -> None:
    """Have Megatron make an optimizer of which this fraction is in host memory; of none for 0."""
    if not fraction:
        return
    megatron_on_cpu.adapt_hybrid_optimizer()
    settings.optimizer_cpu_offload = True
    settings.optimizer_offload_fraction = fraction
    settings.overlap_cpu_optimizer_d2h_h2d = True
    settings.pin_cpu_grads = torch.cuda.is_available()
    # Without it the float32 main weights would stay on the device, beside their copies on the host. Given to the
    # constructor, it asks for Transformer Engine's version also where there is none.
    settings.use_precision_aware_optimizer = True
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    settings.store_param_remainders = False


def is_hybrid(optimizer: Any) -> bool:
    """Whether one of Megatron's optimizers works on the host, in part or in whole."""
    return isinstance(optimizer.optimizer, HybridDeviceOptimizer)


def allocate_moments(optimizer: Any) -> None:
    """Give one that has not stepped the state that it would have, all zeros; its own `dummy_step` moves the weights."""
    inner = optimizer.optimizer
    for part in inner.sub_optimizers:
        for parameter in _parameters(part):
            state = part.state[parameter]
            if "exp_avg" not in state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                if _is_torch(part):
                    state["step"] = torch.zeros((), device=parameter.device)
    inner._sync_sub_optimizers_state_to_hdo()


def set_step(optimizer: Any, step: int) -> None:
    """Set the number of steps that Adam corrects its moments by, where each of its parts keeps it."""
    for part in optimizer.optimizer.sub_optimizers:
        if _is_torch(part):
            for parameter in _parameters(part):
                part.state[parameter]["step"] = torch.tensor(float(step), device=parameter.device)
        else:
            for group in part.param_groups:
                group["step"] = step
    optimizer.optimizer._sync_sub_optimizers_state_to_hdo()


def without_settings(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a distributed optimizer with groups as it has them without the host, classes left out."""
    inner = state["optimizer"]
    groups = [
        {name: value for name, value in group.items() if name not in _SETTINGS} for group in inner["param_groups"]
    ]
    return {**state, "optimizer": {**inner, "param_groups": groups}}


def _parameters(part: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in part.param_groups for parameter in group["params"]]


def _is_torch(part: Any) -> bool:
    return isinstance(part, torch.optim.Adam | torch.optim.AdamW)
