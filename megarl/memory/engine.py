"""A vLLM engine on a rank: weights, KV cache, the memory of a step. Integers only."""

from __future__ import annotations

from collections import defaultdict
from math import prod

from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.reshard.layouts.vllm_computed import Stack, VllmLayouts

BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
"""Tokens of a KV cache block, as the engine is started."""
BATCHED_TOKENS = {"cpu": 8192, "cuda": 16384}
"""Tokens that a step computes at most: vLLM's default for a GPU of 70 GiB or more, megarl's on a CPU."""


QUANTISED_BLOCK = 128
"""Rows and columns that share a scale under `rollout.quantization: fp8`."""
_SCALE_BYTES = 4
_QUANTISING_BYTES = 8
"""Bytes a number that vLLM holds while it quantises a linear layer of 16 bits a number in blocks."""


def engine_weights(layouts: VllmLayouts, rank: int, itemsize: int, quantization: str = "none") -> int:
    """Bytes of the engine's parameters on a rank, scales of FP8 weights included, and of its rotary embeddings."""
    model = layouts.model
    rotary = model.max_position_embeddings * model.head_dim * itemsize
    if quantization == "none":
        return layouts.numel_on(rank) * itemsize + rotary
    total = rotary
    for stack, shape, count in layouts.stacks_on(rank):
        if _is_quantised(stack):
            total += count * _quantised_bytes(stack, shape, quantization == "fp8")
        else:
            total += count * prod(shape) * itemsize
    return total


def waiting_bytes(layouts: VllmLayouts, rank: int, itemsize: int, *, bucket_bytes: int, stages: int) -> int:
    """Bytes that a reshard to an engine with FP8 weights has on a rank at most, beside weights and buckets.

    The weights that are not yet complete (`reshard.quantised`): the plan goes through the layers of the trainer's
    pipeline `stages` side by side, and has three buckets under way; then the largest module, as it was loaded with its
    rows padded, and what it is quantised with: FP8, experts one after the other; of a linear layer vLLM holds a padded
    copy, its absolute values and both in float32.
    """
    modules: dict[str, int] = defaultdict(int)
    for stack, shape, count in layouts.stacks_on(rank):
        if _is_quantised(stack):
            # Both matrices of a layer's experts are quantised together.
            name = "experts" if stack.stacks_experts else stack.storage
            modules[name] += prod(_padded(stack, shape)) * count // layouts.model.num_layers
    layer = sum(modules.values())
    whole = layer * layouts.model.num_layers
    waiting = min(whole * itemsize, 2 * stages * layer * itemsize + 3 * bucket_bytes)
    beside = max(numel * (1 if name == "experts" else _QUANTISING_BYTES) for name, numel in modules.items())
    return waiting + max(modules.values()) * itemsize + beside


def _is_quantised(stack: Stack) -> bool:
    """vLLM quantises linear layers and experts; their biases, norms, embeddings, head and routers stay."""
    return stack.stacks_experts or stack.storage.endswith("_proj.weight")


def _padded(stack: Stack, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a matrix that vLLM quantises; of an expert's, each projection has whole blocks."""
    rows, columns = shape
    if not stack.stacks_experts:
        return rows, columns
    projections = len(stack.parts)
    return projections * _rounded(rows // projections), _rounded(columns)


def _quantised_bytes(stack: Stack, shape: tuple[int, ...], in_blocks: bool) -> int:
    if not in_blocks:
        return prod(shape) + shape[0] * _SCALE_BYTES
    rows, columns = _padded(stack, shape)
    return rows * columns + _rounded(rows) // QUANTISED_BLOCK * (_rounded(columns) // QUANTISED_BLOCK) * _SCALE_BYTES


def _rounded(size: int) -> int:
    return -(-size // QUANTISED_BLOCK) * QUANTISED_BLOCK


def cache_block_bytes(model: ModelShape, tp: int, *, block_tokens: int, itemsize: int) -> int:
    """Bytes of one block of the KV cache on a rank, all layers together; `itemsize` bytes a number."""
    heads = max(1, model.num_kv_heads // tp)
    return 2 * block_tokens * model.num_layers * heads * model.head_dim * itemsize


def cache_bytes(asked: int, block_bytes: int) -> int:
    """Bytes of the KV cache that vLLM makes of what it was given: whole blocks."""
    return asked // block_bytes * block_bytes


def step_bytes(model: ModelShape, tp: int, *, batched_tokens: int, max_requests: int, itemsize: int) -> int:
    """Bytes of an engine step at most, beside weights and cache: a layer's activations, then the sampler's logits.

    Counted are the residual stream and its norm, and of the wider sublayer its input's and output's channels; logits
    as the model gives them, in float32, and once more as probabilities.
    """
    channels = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim // tp
    feed_forward = 3 * model.intermediate_size // tp
    if model.num_experts:
        feed_forward = model.top_k * (3 * model.moe_intermediate_size // tp + 2 * model.hidden_size)
    layer = batched_tokens * (3 * model.hidden_size + max(channels, feed_forward)) * itemsize
    rows = padded_vocab_size(model.vocab_size, 1)
    sampler = max_requests * rows * (itemsize + 3 * 4)
    return max(layer, sampler)
