"""Model FLOPs of a forward pass, from a model's shape. No torch. Source: PaLM (arXiv 2204.02311, appendix B).

A multiply-add counts as two FLOPs. Included are causal attention and the matrix products of projections, feed-forward
layers (for experts: a token's chosen ones), routers and output head. Norms, activations and recomputation are excluded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from megarl.families.parts import LayerKind
from megarl.families.shape import ModelShape


def matrix_flops(shape: ModelShape) -> float:
    """Return the FLOPs of one token's matrix products, two per used weight, without attention scores."""
    layer_weights = sum(
        count * _count_layer_multiply_adds(shape, kind) for kind, count in Counter(shape.layers).items()
    )
    head_weights = shape.hidden_size * (1 if shape.has_value_head else shape.vocab_size)
    return 2.0 * (layer_weights + head_weights)


def _count_layer_multiply_adds(shape: ModelShape, kind: LayerKind) -> int:
    """Return the multiply-adds of one token in a layer, without attention scores."""
    feed_forward, router = shape.intermediate_size, 0
    if kind.has_experts:
        feed_forward = shape.top_k * shape.moe_intermediate_size + shape.shared_intermediate_size
        # The router has one row for each expert.
        router = shape.hidden_size * shape.num_experts
    # A gated layer has three matrices: gate, up and down.
    return _count_mixer_multiply_adds(shape, kind) + 3 * shape.hidden_size * feed_forward + router


def _count_mixer_multiply_adds(shape: ModelShape, kind: LayerKind) -> int:
    """Return the multiply-adds of one token in a layer's attention projections (also linear attention), without
    scores.
    """
    linear = shape.linear_attention
    if kind.mixer == "attention" or linear is None:
        return shape.attention.projection_elements(shape.hidden_size)
    return linear.count_multiply_adds(shape.hidden_size)


def _pair_flops(shape: ModelShape) -> int:
    """Return the FLOPs of one query token's attention to one key token in a layer: two per channel of score and
    value.
    """
    return 2 * (shape.attention.score_channels + shape.attention.value_channels)


@dataclass(frozen=True, slots=True)
class SequenceFlops:
    """FLOPs of a forward pass over a sequence, as a function of its length."""

    token_flops: float
    """FLOPs of a token's matrix products."""
    pair_flops: tuple[tuple[int, float], ...]
    """Pairs (window in tokens, 0: none; FLOPs of a token pair, summed over the layers with this window)."""

    def __call__(self, lengths: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the FLOPs of each sequence. `lengths` and the result are [sequences]."""
        num_tokens = np.asarray(lengths, np.float64)
        flops = self.token_flops * num_tokens
        for window, pair_flops in self.pair_flops:
            attended_tokens = np.minimum(num_tokens, window) if window else num_tokens
            # Up to the window a token attends to half of its predecessors on average, then to the whole window.
            flops += pair_flops * (attended_tokens * num_tokens - np.square(attended_tokens) / 2)
        return flops


@cache
def sequence_flops(shape: ModelShape) -> SequenceFlops:
    windows = Counter(kind.window for kind in shape.layers if kind.mixer == "attention")
    pairs = tuple((window, float(count * _pair_flops(shape))) for window, count in windows.items())
    return SequenceFlops(matrix_flops(shape), pairs)


def forward_flops(shape: ModelShape, lengths: NDArray[np.integer]) -> float:
    return float(sequence_flops(shape)(lengths).sum())


def update_only_flops(shape: ModelShape, lengths: NDArray[np.integer]) -> float:
    """Return the FLOPs of a trained draft layer, used in updates only, over sequences of `lengths` [sequences].

    Each weight of the layer takes part in three products: forward, and both gradients. The head takes part in two,
    because this loss gives it no weight gradient.
    """
    if not shape.num_draft_layers:
        return 0.0
    num_tokens = np.asarray(lengths, np.float64)
    # The projection has the embedding and the hidden state as input.
    layer_weights = _count_layer_multiply_adds(shape, shape.draft_layer_kind) + 2 * shape.hidden_size**2
    head_weights = shape.hidden_size * shape.vocab_size
    matrix_flops = (3 * 2.0 * layer_weights + 2 * 2.0 * head_weights) * num_tokens.sum()
    return float(matrix_flops + 3 * _pair_flops(shape) * np.square(num_tokens).sum() / 2)
