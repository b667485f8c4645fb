"""Reasons that keep an optimizer from working in host memory (`trainer.optimizer_offload_fraction`)."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe


def obstacles(recipe: Recipe) -> Iterator[str]:
    """Why no parameter's optimizer state can be in host memory all the time, a line each with remedy."""
    trainer = recipe.trainer
    if recipe.model.dtype != "bfloat16":
        yield "Megatron-Core has it for bfloat16 alone; leave it out, or set model.dtype=bfloat16"
    if not trainer.distributed_optimizer:
        # Which is Adam's: SGD has no state, and is refused beside it.
        yield "is of the distributed optimizer; leave trainer.distributed_optimizer out"
    if recipe.lora.rank:
        yield f"under lora.rank = {recipe.lora.rank} only adapters have an optimizer state; leave it out"
