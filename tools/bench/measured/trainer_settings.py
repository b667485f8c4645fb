"""Settings of a built trainer that may change between two updates: offload, recomputation, log-prob chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.training.training_engine import TrainingEngine


def set_recomputation(engine: TrainingEngine, recompute: str) -> None:
    """Set trainer.recompute to `none` or `full`. Megatron-Core 0.16.1 reads these fields in each forward pass."""
    config: Any = engine.config
    is_full = recompute == "full"
    config.recompute_granularity = "full" if is_full else None
    config.recompute_method = "uniform" if is_full else None
    config.recompute_num_layers = 1 if is_full else None


def set_offload(engine: TrainingEngine, offload: Sequence[str]) -> None:
    """Set trainer.offload for the next time that the trainer hands its memory to the engine."""
    trainer = engine.recipe.trainer.model_copy(update={"offload": tuple(offload)})
    engine.recipe = engine.recipe.model_copy(update={"trainer": trainer})


def set_chunk_tokens(engine: TrainingEngine, tokens: int) -> None:
    """Set trainer.logprob_chunk_tokens."""
    chunks: Any = engine.chunks
    for chunk in chunks:
        chunk.logprob_chunk_tokens = tokens
