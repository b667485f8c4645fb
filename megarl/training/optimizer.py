"""Megatron's optimizer and learning-rate schedule from a recipe's settings."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config import OptimizerConfig


def build_optimizer(
    config: OptimizerConfig, model: DistributedDataParallel, *, dtype: torch.dtype, distributed: bool
) -> MegatronOptimizer:
    """AdamW over float32 master weights, its state sharded over the data-parallel ranks if `distributed`."""
    settings = MegatronOptimizerConfig(
        optimizer="adam",
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
    return get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)


def build_schedule(
    config: OptimizerConfig, optimizer: MegatronOptimizer, *, num_updates: int
) -> OptimizerParamScheduler:
    """Linear warm-up, then constant, linear or cosine to the last update. Step it before each update."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(num_updates, config.warmup_steps + 1),
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
