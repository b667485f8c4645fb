"""Size of the engines' KV cache: the least that a longest sequence needs, and the default, the rest of a GPU."""

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

_GIB = 2**30


def least_cache_gib(recipe: Recipe, shape: ModelShape) -> float:
    """Return the size in GiB of the smallest KV cache of a rank holding the longest possible sequence."""
    block = block_tokens(recipe) or BLOCK_TOKENS["cuda"]
    return float(gib_text(needed_bytes(recipe, shape, block=block, tokens=recipe.context_tokens)))


def is_cache_given(recipe: Recipe) -> bool:
    """Return whether the recipe sets the size of the KV cache, in GiB or as a share of the GPU."""
    rollout = recipe.rollout
    return "kv_cache_gib" in rollout.model_fields_set or rollout.gpu_memory_utilization is not None


def default_cache_gib(recipe: Recipe, judge: MemoryJudge) -> float:
    """Return the default size of one rank's KV cache in GiB: the GPU memory left over by the run, minus a margin.

    It is at least the size needed by the longest possible sequence.
    """
    least = least_cache_gib(recipe, judge.models.policy.shape)
    # Plan with the smallest cache first. The memory then left in the fullest sampling phase is added to the cache.
    smallest = with_field_values(recipe, {"rollout.kv_cache_gib": least})
    return max(least, cache_within(judge.predict(smallest), judge.gpus.engine - MARGIN_GIB))


def cache_within(table: MemoryTable, limit_gib: float) -> float:
    """Return the size in GiB, rounded down to tenths, of the largest KV cache for which engine ranks need at most
    `limit_gib`.

    It is negative if no cache fits.
    """
    sampling = [phase for phase in table.phases if phase.use("KV cache").device_bytes]
    without_cache = max((phase.device_bytes - phase.use("KV cache").device_bytes for phase in sampling), default=0)
    return math.floor((limit_gib - without_cache / _GIB) * 10) / 10


def block_tokens(recipe: Recipe) -> int | None:
    """Return the number of tokens in one KV cache block. None: `block_size` is not a positive whole number."""
    block = recipe.rollout.vllm.get("block_size") or BLOCK_TOKENS["cpu" if runs_on_cpu() else "cuda"]
    return block if isinstance(block, int) and block >= 1 else None


def needed_bytes(recipe: Recipe, shape: ModelShape, *, block: int, tokens: int) -> int:
    """Return the bytes of a rank's KV cache for one sequence, plus one block reserved by vLLM."""
    rollout = recipe.rollout
    # A quantised cache (FP8) takes one byte a value.
    item_bytes = ITEM_BYTES[recipe.model.dtype] if rollout.kv_cache_dtype == "auto" else 1
    engine = shape.with_draft_layers(recipe.rollout.drafts_with_model_layers)
    block_bytes = cache_block_bytes(
        engine, rollout.tp, block_tokens=block, itemsize=item_bytes, draft_layers=bool(recipe.drafter)
    )
    return (-(-tokens // block) + 1) * block_bytes


def gib_text(size: int) -> str:
    """Format bytes as a number of GiB, rounded up to three decimals (below 0.1: to three significant digits).

    A KV cache of the printed size is therefore never too small.
    """
    digits = 3
    while size < 10 ** (2 - digits) * 2**30:
        digits += 1
    return f"{-(-size * 10**digits // 2**30) / 10**digits:g}"
