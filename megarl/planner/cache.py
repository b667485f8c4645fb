"""Sizes of an engine's KV cache in GiB: the smallest possible, and the default."""

from __future__ import annotations

import math

from megarl.config import Recipe
from megarl.families.shape import ModelShape
from megarl.planner.judge import MemoryJudge
from megarl.planner.memory.devices import MARGIN_GIB
from megarl.planner.memory.engine_bytes import BLOCK_TOKENS, cache_block_bytes
from megarl.planner.memory.memory_table import MemoryTable
from megarl.planner.memory.rank_memory import ITEM_BYTES
from megarl.planner.search import with_field_values
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.rounding import divide_up

_GIB = 2**30


def least_cache_gib(recipe: Recipe, shape: ModelShape) -> float:
    """Return the GiB of a rank's KV cache for one sequence of the longest possible length."""
    block = block_tokens(recipe) or BLOCK_TOKENS["cuda"]
    return float(gib_text(sequence_cache_bytes(recipe, shape, block_tokens=block, tokens=recipe.context_tokens)))


def sets_cache_size(recipe: Recipe) -> bool:
    rollout = recipe.rollout
    return "kv_cache_gib" in rollout.model_fields_set or rollout.gpu_memory_utilization is not None


def default_cache_gib(recipe: Recipe, judge: MemoryJudge) -> float:
    """Return a rank's default KV cache in GiB: the memory free during sampling minus a margin, at least
    `least_cache_gib`.
    """
    least = least_cache_gib(recipe, judge.models.policy.shape)
    # Plan with the smallest cache. Then add the memory left free in the fullest sampling phase.
    with_least_cache = with_field_values(recipe, {"rollout.kv_cache_gib": least})
    return max(least, cache_within(judge.predict(with_least_cache), judge.gpus.engine - MARGIN_GIB))


def cache_within(table: MemoryTable, limit_gib: float) -> float:
    """Return the GiB of the largest KV cache with which engine ranks need at most `limit_gib`, in tenths.

    `table` is a prediction with any other cache. Negative: no cache fits.
    """
    sampling = [phase for phase in table.phases if phase.use("KV cache").device_bytes]
    without_cache = max((phase.device_bytes - phase.use("KV cache").device_bytes for phase in sampling), default=0)
    return math.floor((limit_gib - without_cache / _GIB) * 10) / 10


def block_tokens(recipe: Recipe) -> int | None:
    """Return the tokens of one block of the KV cache; None: `rollout.vllm.block_size` is not a positive integer."""
    block = recipe.rollout.vllm.get("block_size") or BLOCK_TOKENS["cpu" if runs_on_cpu() else "cuda"]
    return block if isinstance(block, int) and block >= 1 else None


def sequence_cache_bytes(recipe: Recipe, shape: ModelShape, *, block_tokens: int, tokens: int) -> int:
    """Return the bytes of a rank's KV cache for one sequence of `tokens`, plus one block reserved by vLLM."""
    rollout = recipe.rollout
    # An FP8 cache takes one byte per number.
    item_bytes = ITEM_BYTES[recipe.model.dtype] if rollout.kv_cache_dtype == "auto" else 1
    engine = shape.with_draft_layers(recipe.rollout.drafts_with_model_layers)
    block_bytes = cache_block_bytes(
        engine, rollout.tp, block_tokens=block_tokens, itemsize=item_bytes, draft_layers=bool(recipe.drafter)
    )
    return (divide_up(tokens, by=block_tokens) + 1) * block_bytes


def gib_text(size: int) -> str:
    """Format bytes as GiB, rounded up to three decimals, below 0.1 to three significant digits."""
    digits = 3
    while size < 10 ** (2 - digits) * 2**30:
        digits += 1
    return f"{divide_up(size * 10**digits, by=2**30) / 10**digits:g}"
