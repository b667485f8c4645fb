"""Checks of what vLLM would refuse once its ranks are started: head size, KV cache, what the platform lacks."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.families.shape import ModelShape
from megarl.memory.engine import BLOCK_TOKENS, cache_block_bytes
from megarl.memory.phases import ITEM_BYTES
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.preflight.library_fields import supported_head_sizes


def engine_fit(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Faults of a recipe whose model is sampled from."""
    if not recipe.has_engine:
        return
    yield from _head_size(recipe, shape)
    yield from _kv_cache(recipe, shape)
    yield from _stop_tokens(recipe, shape)
    if recipe.rollout.async_scheduling and runs_on_cpu():
        yield "rollout.async_scheduling = True: vLLM has none on a CPU; leave it out, then it is on where vLLM has it"


def _head_size(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    sizes = supported_head_sizes() if runs_on_cpu() else []
    if sizes and shape.head_dim not in sizes:
        yield (
            f"model.path = {recipe.model.path}: its attention heads have {shape.head_dim} channels, vLLM's attention "
            f"on CPU takes {', '.join(map(str, sizes))}; take another model, or a machine with GPUs"
        )


def _kv_cache(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """The cache of a rank must hold one sequence of the longest kind."""
    rollout = recipe.rollout
    if rollout.gpu_memory_utilization is not None:
        return
    item_bytes = ITEM_BYTES[recipe.model.dtype] if rollout.kv_cache_dtype == "auto" else 1
    block = rollout.vllm.get("block_size") or BLOCK_TOKENS["cpu" if runs_on_cpu() else "cuda"]
    if not isinstance(block, int) or block < 1:
        return
    new_tokens = max(rollout.sampling.max_new_tokens, recipe.evaluation_sampling.max_new_tokens)
    longest = recipe.data.max_prompt_tokens + new_tokens
    block_bytes = cache_block_bytes(shape, rollout.tp, block_tokens=block, itemsize=item_bytes)
    # vLLM holds one block back.
    needed = (-(-longest // block) + 1) * block_bytes
    if needed > rollout.kv_cache_gib * 2**30:
        held = max(0, int(rollout.kv_cache_gib * 2**30 / block_bytes) - 1) * block
        yield (
            f"rollout.kv_cache_gib = {rollout.kv_cache_gib:g}: holds {held} tokens on a rank, one sequence of "
            f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + max_new_tokens {new_tokens} has {longest}; "
            f"give at least {_gib(needed)}, or lower those"
        )


def _stop_tokens(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """vLLM would look for ids that no token has, and never stop at them."""
    found = {
        "rollout.sampling": recipe.rollout.sampling.stop_token_ids,
        "evaluation.sampling": recipe.evaluation.sampling.stop_token_ids or (),
    }
    for field, token_ids in found.items():
        if beyond := [token_id for token_id in token_ids if token_id >= shape.vocab_size]:
            yield (
                f"{field}.stop_token_ids = {list(token_ids)}: the model's vocabulary of {shape.vocab_size} ends before "
                f"{beyond[0]}; give ids of its tokenizer"
            )


def _gib(size: int) -> str:
    """GiB, rounded up to three digits that a recipe can take."""
    digits = 3
    while size < 10 ** (2 - digits) * 2**30:
        digits += 1
    return f"{-(-size * 10**digits // 2**30) / 10**digits:g}"
