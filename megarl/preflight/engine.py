"""Checks of what vLLM would refuse once its ranks are started: head size, KV cache, what the platform lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from megarl.config import Recipe
from megarl.config.formulas import either
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
    yield from _drafter(recipe)
    if recipe.rollout.async_scheduling and runs_on_cpu():
        yield "rollout.async_scheduling = True: vLLM has none on a CPU; leave it out, then it is on where vLLM has it"


HOST_DRAFTERS = ("ngram", "suffix", "custom_class")
"""Methods of vLLM's speculative decoding that draft on the host; vLLM begins no step ahead of them."""
_WEIGHTLESS = (*HOST_DRAFTERS, "ngram_gpu")


def _drafter(recipe: Recipe) -> Iterator[str]:
    """Of speculative decoding: which drafters an engine can have, and where."""
    config = recipe.rollout.vllm.get("speculative_config")
    if not isinstance(config, Mapping) or not config:
        return
    method = config.get("method") or _method_of(config.get("model"))
    field = f"rollout.vllm.speculative_config = {dict(config)}"
    if method not in _WEIGHTLESS:
        # vLLM builds the drafter like the model, without reading files; then only the model's weights are written.
        yield (
            f"{field}: a drafter with weights of its own would keep random ones, for a reshard moves the policy's; set "
            f"its method to {either(_WEIGHTLESS)}, or leave it out"
        )
    elif runs_on_cpu():
        yield f"{field}: vLLM accepts drafts of sampled tokens by Triton's kernels, which a CPU has not; leave it out"
    if method == "suffix" and find_spec("arctic_inference") is None:
        yield f"{field}: vLLM drafts by suffixes with arctic-inference, which is not installed; take ngram"
    if recipe.rollout.async_scheduling and method in HOST_DRAFTERS:
        yield (
            f"rollout.async_scheduling = True: the drafter {method} works on the host, between an engine's steps, so "
            "that none is begun ahead; leave it out, or take ngram_gpu (rollout.vllm.speculative_config)"
        )


def _method_of(model: object) -> str | None:
    """The method that vLLM 0.30 takes where only a model is given; None for a drafter with weights of its own."""
    if model in ("ngram", "[ngram]"):
        return "ngram"
    parts = model.split(".") if isinstance(model, str) else []
    is_class = len(parts) > 1 and all(part.isidentifier() for part in parts)
    return "custom_class" if is_class else None


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
    if rollout.gpu_memory_utilization is not None or (block := _block_tokens(recipe)) is None:
        return
    new_tokens = max(rollout.sampling.max_new_tokens, recipe.evaluation_sampling.max_new_tokens)
    longest = recipe.data.max_prompt_tokens + new_tokens
    needed = _needed_bytes(recipe, shape, block, longest)
    if needed > rollout.kv_cache_gib * 2**30:
        block_bytes = _needed_bytes(recipe, shape, block, 0)
        held = max(0, int(rollout.kv_cache_gib * 2**30 / block_bytes) - 1) * block
        yield (
            f"rollout.kv_cache_gib = {rollout.kv_cache_gib:g}: holds {held} tokens on a rank, one sequence of "
            f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + max_new_tokens {new_tokens} has {longest}; "
            f"give at least {_gib(needed)}, or lower those"
        )


def least_cache_gib(recipe: Recipe, shape: ModelShape) -> float:
    """GiB of the smallest KV cache of a rank that holds one sequence of the longest kind."""
    block = _block_tokens(recipe) or BLOCK_TOKENS["cuda"]
    return float(_gib(_needed_bytes(recipe, shape, block, recipe.context_tokens)))


def _block_tokens(recipe: Recipe) -> int | None:
    """Tokens of a block of the KV cache; None for a `block_size` that is not a positive whole number."""
    block = recipe.rollout.vllm.get("block_size") or BLOCK_TOKENS["cpu" if runs_on_cpu() else "cuda"]
    return block if isinstance(block, int) and block >= 1 else None


def _needed_bytes(recipe: Recipe, shape: ModelShape, block: int, tokens: int) -> int:
    """Bytes of a rank's KV cache for one sequence, and for the one block that vLLM holds back."""
    rollout = recipe.rollout
    item_bytes = ITEM_BYTES[recipe.model.dtype] if rollout.kv_cache_dtype == "auto" else 1
    return (-(-tokens // block) + 1) * cache_block_bytes(shape, rollout.tp, block_tokens=block, itemsize=item_bytes)


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
