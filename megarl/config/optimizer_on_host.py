"""Checks of `trainer.optimizer_offload_fraction`: whether optimizer state can stay in host memory."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe


def obstacles(recipe: Recipe) -> Iterator[str]:
    """Yield an error line with remedy for each reason why optimizer state cannot stay in host memory."""
    trainer = recipe.trainer
    if recipe.model.dtype != "bfloat16":
        yield "Megatron-Core supports it for bfloat16 only; leave it out, or set model.dtype=bfloat16"
    if not trainer.distributed_optimizer:
        # optimizer.name needs no check: SGD has no state, and is refused with the distributed optimizer.
        yield "needs the distributed optimizer; leave trainer.distributed_optimizer out"
    if recipe.optimizer.name == "muon" or (recipe.has_critic and recipe.critic.optimizer.name == "muon"):
        yield "Muon gathers whole matrices on GPUs; leave it out, or set optimizer.name=adam"
    if recipe.lora.rank:
        yield f"under lora.rank = {recipe.lora.rank} only adapters have an optimizer state; leave it out"
