"""Bytes of a vLLM engine on a rank: weights, KV cache, CUDA graphs, temporary memory of a step."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from math import prod

from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.families.tensors.stacks import Stack
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.rounding import divide_up, round_up

BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
"""Tokens per block of the KV cache, as set when the engine starts."""
BATCHED_TOKENS = {"cpu": 8192, "cuda": 16384}
"""Maximum tokens of an engine step: vLLM's default on GPUs of 70 GiB or more, megarl's default on CPUs."""


GRAPH_LAYER_BYTES = int(0.4 * 2**20)
"""GPU memory of one CUDA graph per layer. Source: vLLM's log lines `Graph capturing finished ... took` for Llama-3.2-1B
(0.38 MiB, vllm pull request 11349) and Qwen3.5-35B-A3B (0.40 MiB, vllm issue 50722).
"""
_LARGEST_GRAPH = 512
"""Tokens of the largest step replayed as a CUDA graph: vLLM 0.30's default, except on Blackwell."""

QUANTISED_BLOCK = 128
"""Rows and columns that share a scale under `rollout.quantization: fp8`."""
_SCALE_BYTES = _FLOAT32_BYTES = 4
_QUANTISING_BYTES = 8
"""Bytes per number that vLLM needs to quantise a 16-bit linear layer in blocks."""


# A search of layouts repeats the same engine with many trainers.
@lru_cache(maxsize=512)
def engine_weight_bytes(layouts: VllmLayouts, rank: int, *, itemsize: int, quantization: str = "none") -> int:
    """Return the bytes of the engine's parameters on a rank, with FP8 scales and rotary embeddings."""
    model = layouts.model
    # vLLM stores cosines and sines for all positions, half of the head's channels each.
    rotary = model.max_position_embeddings * model.rotary_channels * itemsize
    if quantization == "none":
        return layouts.bytes_on(rank, itemsize) + rotary
    total = rotary
    for stack, shape, count in layouts.stacks_on(rank):
        if _is_quantised(stack):
            total += count * _quantised_bytes(stack, shape, quantization == "fp8")
        else:
            total += count * prod(shape) * (itemsize if stack.dtype == "model" else _FLOAT32_BYTES)
    return total


def unquantised_bytes(layouts: VllmLayouts, rank: int, *, itemsize: int, bucket_bytes: int, stages: int) -> int:
    """Return the peak bytes of a reshard to an FP8 engine on a rank, besides weights and buckets.

    16-bit weights wait until their module is complete (`reshard.quantised`): the layers of all pipeline `stages` arrive
    in parallel, with three buckets in flight. The largest module is quantised, with padded rows and vLLM's temporary
    memory: for a linear layer a padded copy and its absolute values in float32.
    """
    module_numels: dict[str, int] = defaultdict(int)
    for stack, shape, count in layouts.stacks_on(rank):
        if _is_quantised(stack):
            # Both matrices of a layer's experts are quantised together, so they count as one module.
            name = "experts" if stack.stacks_experts else stack.storage
            # The mean over layers: `count` covers all layers, and only some of them may have such a module.
            module_numels[name] += prod(_pad_to_blocks(stack, shape)) * count // layouts.model.num_layers
    layer_numel = sum(module_numels.values())
    model_numel = layer_numel * layouts.model.num_layers
    # At most all weights wait. Otherwise two layers per stage are incomplete, plus the buckets in flight.
    waiting_bytes = min(model_numel * itemsize, 2 * stages * layer_numel * itemsize + 3 * bucket_bytes)
    # One byte per number of experts: their FP8 copy. A single expert's temporary memory is negligible.
    temporary_bytes = max(
        numel * (1 if name == "experts" else _QUANTISING_BYTES) for name, numel in module_numels.items()
    )
    return waiting_bytes + max(module_numels.values()) * itemsize + temporary_bytes


def _is_quantised(stack: Stack) -> bool:
    return stack.stacks_experts or stack.storage.endswith("_proj.weight")


def _pad_to_blocks(stack: Stack, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a quantised matrix. Each projection of an expert is padded to whole blocks."""
    rows, columns = shape
    if not stack.stacks_experts:
        return rows, columns
    projections = len(stack.parts)
    return (
        projections * round_up(rows // projections, multiple=QUANTISED_BLOCK),
        round_up(columns, multiple=QUANTISED_BLOCK),
    )


def _quantised_bytes(stack: Stack, shape: tuple[int, ...], in_blocks: bool) -> int:
    """Return the bytes of an FP8 weight with its scales: one per block of `QUANTISED_BLOCK` squared, or one per row."""
    # fp8_per_channel has one scale for each row.
    if not in_blocks:
        return prod(shape) + shape[0] * _SCALE_BYTES
    rows, columns = _pad_to_blocks(stack, shape)
    num_scales = divide_up(rows, by=QUANTISED_BLOCK) * divide_up(columns, by=QUANTISED_BLOCK)
    return rows * columns + num_scales * _SCALE_BYTES


def cache_block_bytes(model: ModelShape, tp: int, *, block_tokens: int, itemsize: int, draft_layers: int = 0) -> int:
    """Return the bytes of one block of a rank's KV cache over all layers. `itemsize`: bytes per number.

    `draft_layers`: layers of a drafter with files of its own.
    """
    layers = sum(kind.mixer == "attention" for kind in model.layers) + model.num_draft_layers + draft_layers
    return block_tokens * layers * model.attention.cached_numbers(tp) * itemsize


def cache_bytes(limit_bytes: int, *, block_bytes: int) -> int:
    """Round `limit_bytes` down to whole blocks."""
    return limit_bytes // block_bytes * block_bytes


def graph_bytes(model: ModelShape, *, max_requests: int) -> int:
    """Return the bytes of an engine's CUDA graphs.

    Each captured size has a graph of the layers between attentions. Sizes up to `max_requests` also have a graph of the
    whole model.
    """
    largest_tokens = min(2 * max_requests, _LARGEST_GRAPH)
    # Source: vLLM 0.30, config/vllm.py, _set_cudagraph_sizes.
    captured_tokens = [
        size for size in (1, 2, 4, *range(8, 256, 8), *range(256, largest_tokens + 1, 16)) if size <= largest_tokens
    ]
    num_graphs = len(captured_tokens) + sum(size <= max_requests for size in captured_tokens)
    return num_graphs * model.num_layers * GRAPH_LAYER_BYTES


def step_bytes(model: ModelShape, tp: int, *, batched_tokens: int, max_requests: int, itemsize: int) -> int:
    """Return the peak temporary bytes of an engine step: a layer's activations, or the sampler's logits.

    A layer has the residual stream, its norm, and input and output of its wider part. Logits exist three times: in the
    model's type, float32, and as probabilities.
    """
    attention_channels = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim // tp
    # The widest feed-forward layer decides.
    dense_channels = 3 * model.intermediate_size // tp
    routed_channels = model.top_k * (3 * model.moe_intermediate_size // tp + 2 * model.hidden_size)
    feed_forward_channels = max(routed_channels if kind.has_experts else dense_channels for kind in set(model.layers))
    layer_bytes = batched_tokens * (3 * model.hidden_size + max(attention_channels, feed_forward_channels)) * itemsize
    vocabulary_rows = padded_vocab_size(model.vocab_size, 1)
    sampler_bytes = max_requests * vocabulary_rows * (itemsize + 3 * 4)
    # The sampler runs after the last layer: its memory and a layer's are never needed together.
    return max(layer_bytes, sampler_bytes)
