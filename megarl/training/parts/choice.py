"""Choice of the optional parts of a trained model. The main path of training names none of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config import OptimizerConfig, Recipe
from megarl.models.experts.balance import ExpertBalance
from megarl.training.model import ModelShard
from megarl.training.model_parts import ModelParts
from megarl.training.muon.optimizer import MuonRule
from megarl.training.optimizer import UpdateRule
from megarl.training.parts.balance import BalancePart
from megarl.training.parts.drafter import DrafterPart, DrafterRate
from megarl.training.parts.engine_part import EnginePart
from megarl.training.parts.lora import LoraPart
from megarl.training.parts.mtp import MtpPart


def select_model_parts(recipe: Recipe, *, is_policy: bool) -> ModelParts:
    """Return the optional features of a trained model's chunks. A critic has none."""
    if not is_policy:
        return ModelParts()
    return ModelParts(
        replays_routes=recipe.trainer.router_replay,
        exact_blocks=recipe.exact_blocks,
        drafts_learn_distribution=recipe.trainer.mtp_targets == "distribution",
        learns_distributions=recipe.loop == "distillation" and not recipe.has_advantages,
    )


def build_engine_parts(shard: ModelShard, *, is_policy: bool) -> Iterator[EnginePart]:
    """Build the optional parts of a trained model. Each changes the model, so their order counts."""
    if is_policy and shard.recipe.lora.rank > 0:
        yield LoraPart(shard)
    if shard.shape.num_draft_layers:
        yield MtpPart(shard)
    balance = ExpertBalance(shard.config, shard.chunks)
    if balance.is_on:
        yield BalancePart(shard, balance)
    if is_policy and shard.recipe.trains_drafter:
        # Last, because the drafter's losses are the last rows of the model's output.
        yield DrafterPart(shard)


def select_update_rule(
    shard: ModelShard, config: OptimizerConfig, engine_parts: Sequence[EnginePart]
) -> UpdateRule | None:
    """Return the rule for parameters with another optimizer or learning rate; None: all are updated alike.

    Equal on all ranks of a model.
    """
    if config.name == "muon":
        return MuonRule(shard, config)
    has_drafter = any(isinstance(part, DrafterPart) for part in engine_parts)
    return DrafterRate(shard, config) if has_drafter else None
