"""A vLLM engine on a rank: weights, KV cache, the memory of a step. Integers only."""

from __future__ import annotations

from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.reshard.layouts.vllm_computed import VllmLayouts

BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
"""Tokens of a KV cache block, as the engine is started."""
BATCHED_TOKENS = {"cpu": 8192, "cuda": 16384}
"""Tokens that a step computes at most: vLLM's default for a GPU of 70 GiB or more, megarl's on a CPU."""


def engine_weights(layouts: VllmLayouts, rank: int, itemsize: int) -> int:
    """Bytes of the engine's parameters on a rank, and of its table of rotary embeddings."""
    model = layouts.model
    return (layouts.numel_on(rank) + model.max_position_embeddings * model.head_dim) * itemsize


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
