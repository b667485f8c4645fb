"""Choice of the optional features of a rank's engine from the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megarl.config import Recipe
from megarl.engine.engine import RolloutEngine
from megarl.engine.parts.choice import EngineFeatures
from megarl.worker.replayed_experts import ReplayedExperts
from megarl.worker.trainer_part import TrainerPart


def build_engine(
    recipe: Recipe, trainer_parts: Mapping[str, TrainerPart] = MappingProxyType({}), *, num_slots: int = 0
) -> RolloutEngine:
    """Build this rank's shard of the recipe's vLLM engine. A collective over the world.

    `trainer_parts` are the trainer's parts on this rank. The part `ReplayedExperts` stores the routed experts (MoE) of
    completions. With `num_slots` above 0, the engine has this many copies of the LoRA adapter.
    """
    rollout = recipe.rollout
    samplings = [source.recipe.rollout.sampling for source in recipe.sources]
    # One engine serves all sources. If any of them uses top-p, top-k or min-p, the engine must record retained tokens.
    if truncated := next((sampling for sampling in samplings if sampling.is_truncated), None):
        rollout = rollout.model_copy(update={"sampling": truncated})
    if recipe.trainer.router_replay:
        # Router replay trains with the experts chosen while sampling. vLLM 0.30 returns them only with this option.
        rollout = rollout.model_copy(update={"vllm": rollout.vllm | {"enable_return_routed_experts": True}})
    replayed_experts = [part for part in trainer_parts.values() if isinstance(part, ReplayedExperts)]
    return RolloutEngine(
        recipe.model.folder,
        rollout,
        max_model_len=recipe.context_tokens,
        dtype=recipe.model.dtype,
        seed=recipe.seed,
        override=recipe.model.override_config,
        features=EngineFeatures(
            store_experts=replayed_experts[0].stored.store if replayed_experts else None,
            adapter=recipe.lora if recipe.sends_adapter else None,
            num_slots=num_slots,
            trains_drafter=recipe.trains_drafter,
            exact_blocks=recipe.exact_blocks,
        ),
        stall_seconds=recipe.cluster.verb_timeout_seconds,
    )
