"""Optional features of a model that change its settings and modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.transformer import TransformerConfig

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape
from megarl.models import parts
from megarl.models.configuration import transformer_config
from megarl.models.distillation.teacher_student import StudentModel
from megarl.models.policy import PackedModel, PolicyModel, ValueModel

Policy = TypeVar("Policy", bound=PolicyModel)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Optional features of a model; the default has none."""

    replays_routes: bool = False
    """Whether the MoE routers can replay the experts that the engine chose."""
    exact_blocks: int = 0
    """Above 0, the model rounds as the engine does. The number is that of a product's blocks, split over all ranks."""
    learns_distributions: bool = False
    """Whether the policy learns from its teachers' distributions."""
    drafts_learn_distribution: bool = False
    """Whether the draft layers learn from the policy's distributions."""

    def megatron_config(
        self,
        recipe: Recipe,
        shape: ModelShape,
        parallel: ParallelConfig,
        *,
        dtype: torch.dtype,
        sequence_parallel: bool,
    ) -> TransformerConfig:
        trainer = recipe.trainer
        return transformer_config(
            shape,
            parallel,
            dtype=dtype,
            sequence_parallel=sequence_parallel,
            recompute=trainer.recompute,
            recompute_modules=trainer.recompute_modules,
            router_replay=self.replays_routes,
            moe_dispatcher=trainer.moe_dispatcher,
            fp8=trainer.fp8,
            exact=self.exact_blocks > 0,
            overrides=trainer.megatron,
        )

    def build_chunk(
        self, recipe: Recipe, config: TransformerConfig, shape: ModelShape, *, vp_stage: int | None, **settings: Any
    ) -> PackedModel:
        """Build one chunk of a policy or critic. `settings` are arguments of `PolicyModel`."""
        if shape.has_value_head:
            return ValueModel(config, shape, vp_stage=vp_stage)
        if self.learns_distributions:
            settings["distillation"] = recipe.distillation
            return self.build_policy(StudentModel, config, shape, vp_stage=vp_stage, **settings)
        return self.build_policy(PolicyModel, config, shape, vp_stage=vp_stage, **settings)

    def build_policy(
        self,
        model_class: Callable[..., Policy],
        config: TransformerConfig,
        shape: ModelShape,
        *,
        vp_stage: int | None,
        **settings: Any,
    ) -> Policy:
        """Build a chunk of this class with the layers that these parts need."""
        return parts.build_policy(
            model_class,
            config,
            shape,
            exact_blocks=self.exact_blocks,
            drafts_learn_distribution=self.drafts_learn_distribution,
            vp_stage=vp_stage,
            **settings,
        )
