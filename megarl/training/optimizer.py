"""Megatron's optimizer and learning-rate schedule, built from a recipe's settings."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    Adam,  # pyright: ignore[reportAttributeAccessIssue]  (it is whichever package's Megatron found)
    ChainedOptimizer,
    MegatronOptimizer,
    ParamKey,
    get_megatron_optimizer,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config import OptimizerConfig
from megarl.training.host.host_optimizer import set_host_fraction


class UpdateRule(Protocol):
    """A rule that updates some parameters instead of Adam, or with another learning rate."""

    def param_group_overrides(self, settings: MegatronOptimizerConfig) -> Mapping[ParamKey, Any]:
        """Return Megatron's overrides that put these parameters into groups of their own."""
        ...

    def replace_adam(self, optimizer: ChainedOptimizer) -> None:
        """Replace Megatron's Adam by an optimizer with this rule, if the rule needs one."""
        ...


def build_optimizer(
    config: OptimizerConfig,
    models: Sequence[DistributedDataParallel],
    *,
    dtype: torch.dtype,
    distributed: bool,
    host_fraction: float = 0.0,
    rule: UpdateRule | None = None,
) -> ChainedOptimizer:
    """Return AdamW or plain SGD over float32 master weights. `rule` may update some parameters differently.

    With `distributed`, data-parallel ranks shard the state. Adam comes from Transformer Engine or apex if installed,
    else from torch. `host_fraction` of the parameters use torch's Adam in host memory.
    """
    settings = MegatronOptimizerConfig(
        # Megatron builds Adam first. Muon then replaces it for some parameters.
        optimizer="adam" if config.name == "muon" else config.name,
        sgd_momentum=0.0,
        lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.epsilon,
        clip_grad=config.clip_grad_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    set_host_fraction(settings, host_fraction)
    overrides: Any = rule.param_group_overrides(settings) if rule else None
    optimizer = get_megatron_optimizer(settings, list(models), overrides, use_gloo_process_groups=False)
    if host_fraction:
        # Megatron-Core 0.16.1 first builds an optimizer of whole parameters. It takes gigabytes of device and host
        # memory, and reference cycles keep it alive until a collection.
        gc.collect()
        torch.cuda.empty_cache()
    chained = optimizer if isinstance(optimizer, ChainedOptimizer) else ChainedOptimizer([optimizer])
    if rule:
        rule.replace_adam(chained)
    return chained


def adam_module() -> str:
    """Return the package of Megatron's Adam: transformer_engine, apex or torch."""
    return Adam.__module__.partition(".")[0]


@torch.no_grad()
def step_if_finite(
    optimizer: ChainedOptimizer, *, is_allowed: bool, max_norm: float | None = None
) -> tuple[float, bool]:
    """Apply the reduced gradients if `is_allowed`, unless their norm is not finite or above `max_norm`.

    Returns the global gradient norm before clipping, and whether parameters changed: equal on all ranks, like
    `is_allowed`.
    """
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    is_spike = max_norm is not None and grad_norm > max_norm
    if is_spike or not (is_allowed and math.isfinite(grad_norm)):
        optimizer.zero_grad()
        return grad_norm, False
    # The `step` of Megatron-Core 0.16.1 does not check the norm in bfloat16 or float32 before it updates. So call its
    # parts.
    for part in optimizer.chained_optimizers:
        if (parameters := part.get_parameters()) and part.config.clip_grad > 0:
            is_decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(list(parameters), part.config.clip_grad, grad_norm, is_decoupled)
    _update_parameters(optimizer.chained_optimizers)
    return grad_norm, True


def _update_parameters(parts: Sequence[MegatronOptimizer]) -> None:
    """Update the parameters of all parts of an optimizer, then gather them once."""
    distributed = [part for part in parts if isinstance(part, DistributedOptimizer)]
    for part in parts:
        if isinstance(part, DistributedOptimizer) and part is not distributed[-1]:
            # A mixture of experts has one part for dense parameters and one for experts. In Megatron-Core 0.16.1 the
            # step of each part gathers the parameters of both parts: twice.
            super(DistributedOptimizer, part).step_with_ready_grads()
        else:
            part.step_with_ready_grads()


def build_schedule(
    config: OptimizerConfig, optimizer: MegatronOptimizer, *, num_updates: int
) -> OptimizerParamScheduler:
    """Return the learning-rate schedule: linear warm-up, then decay until the last update. Step it before each
    update.
    """
    # One more than the number of updates. Otherwise the last update would have the minimum learning rate, often zero.
    num_decay_steps = max(num_updates, 0) + 1
    is_wsd = config.schedule == "wsd"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        lr_warmup_steps=config.warmup_updates(num_decay_steps - 1),
        lr_decay_steps=num_decay_steps,
        lr_decay_style="WSD" if is_wsd else config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=(config.decay_steps or max(1, num_updates // 10)) if is_wsd else None,
        lr_wsd_decay_style="linear" if is_wsd else None,
    )
