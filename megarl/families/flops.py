"""Model FLOPs of a forward pass, from a model's shape. No torch.

A multiply-add counts as two FLOPs. Included are causal attention and the matrix products of projections, feed-forward
layers (only the experts used by a token), routers and output head. Excluded are norms, activations and recomputation.
Source: PaLM (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from megarl.families.mtp import mtp_kind_number
from megarl.families.parts import LayerKind
from megarl.families.shape import ModelShape


def matrix_flops(shape: ModelShape) -> float:
    """Return the FLOPs of one token's matrix products, without attention scores: two for each weight used."""
    layers = sum(count * _layer_weights(shape, kind) for kind, count in Counter(shape.layers).items())
    head = shape.hidden_size * (1 if shape.has_value_head else shape.vocab_size)
    return 2.0 * (layers + head)


def _layer_weights(shape: ModelShape, kind: LayerKind) -> int:
    feed_forward, router = shape.intermediate_size, 0
    if kind.has_experts:
        feed_forward = shape.top_k * shape.moe_intermediate_size + shape.shared_intermediate_size
        # The router has one row for each expert.
        router = shape.hidden_size * shape.num_experts
    # A gated layer has three matrices: gate, up and down.
    return _mixer_weights(shape, kind) + 3 * shape.hidden_size * feed_forward + router


def _mixer_weights(shape: ModelShape, kind: LayerKind) -> int:
    """Return the multiply-adds of one token in a layer's attention, without scores, or in its delta-net."""
    linear = shape.linear_attention
    if kind.mixer == "attention" or linear is None:
        return shape.attention.projection_elements(shape.hidden_size)
    # A state is read for the key, written, and read for the query: arXiv:2412.06464, eq. 10.
    rule = 3 * linear.state_numbers + linear.width * linear.convolved_channels
    return linear.projection_elements(shape.hidden_size) + rule


def attention_flops(shape: ModelShape) -> float:
    """Return the FLOPs of causal attention divided by the squared length of the sequence in tokens.

    Scores and their weighted sum take two FLOPs for each channel, attended token and layer. A token of a sequence of
    length l attends to l / 2 tokens on average.
    """
    layers = sum(kind.mixer == "attention" for kind in shape.layers)
    return float(layers * _pair_flops(shape)) / 2


def _pair_flops(shape: ModelShape) -> int:
    return 2 * (shape.attention.score_channels + shape.attention.value_channels)


def forward_flops(shape: ModelShape, lengths: NDArray[np.integer]) -> float:
    """Return the FLOPs of a forward pass over sequences with these lengths, int [sequences]."""
    tokens = np.asarray(lengths, np.float64)
    matrices = matrix_flops(shape) * tokens.sum()
    if not shape.windows:
        return float(matrices + attention_flops(shape) * np.square(tokens).sum())
    # Every window appears in many layers, so its pairs of tokens are counted once.
    pairs = sum(count * _count_pairs(tokens, window) for window, count in Counter(shape.windows).items())
    return float(matrices + _pair_flops(shape) * pairs)


def _count_pairs(tokens: NDArray[np.float64], window: int) -> float:
    """Return the pairs of a token and an attended one over sequences of these lengths [sequences]; window 0 is none."""
    reach = np.minimum(tokens, window) if window else tokens
    return float((reach * tokens - np.square(reach) / 2).sum())


def update_only_flops(shape: ModelShape, lengths: NDArray[np.integer]) -> float:
    """Return the FLOPs that only an update runs over these sequences: those of a trained layer for multi-token
    prediction.

    Each of its weights takes part in three products: forward, and both gradients; the head's in two, because it has no
    weight gradient there. `lengths` is int [sequences].
    """
    if not shape.num_mtp_layers:
        return 0.0
    tokens = np.asarray(lengths, np.float64)
    # The projection has the embedding and the hidden state as input.
    layer_weights = _layer_weights(shape, shape.layers[mtp_kind_number(shape)]) + 2 * shape.hidden_size**2
    head = shape.hidden_size * shape.vocab_size
    matrices = (3 * 2.0 * layer_weights + 2 * 2.0 * head) * tokens.sum()
    return float(matrices + 3 * _pair_flops(shape) * np.square(tokens).sum() / 2)
