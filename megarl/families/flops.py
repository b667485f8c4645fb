"""Model FLOPs of a forward pass, from a model's shape. No torch.

A multiply-add counts as two FLOPs. Included are causal attention and the matrix products of projections, feed-forward
layers, routers and output head. Only the experts used by a token count. Excluded are norms, activations, and
recomputation to save memory. Source: PaLM (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from megarl.families.shape import ModelShape


def matrix_flops(shape: ModelShape) -> float:
    """Return the FLOPs of one token's matrix products without attention: two for each weight used."""
    channels = shape.num_heads * shape.head_dim
    projections = 2 * shape.hidden_size * (channels + shape.num_kv_heads * shape.head_dim)
    feed_forward = shape.intermediate_size
    if shape.num_experts:
        feed_forward = shape.top_k * shape.moe_intermediate_size + shape.shared_intermediate_size
    # A gated layer has three matrices (gate, up, down); the router has one row for each expert.
    layer = projections + shape.hidden_size * (3 * feed_forward + shape.num_experts)
    head = shape.hidden_size * (1 if shape.has_value_head else shape.vocab_size)
    return 2.0 * (shape.num_layers * layer + head)


def attention_flops(shape: ModelShape) -> float:
    """Return the FLOPs of causal attention divided by the squared length of the sequence in tokens.

    Scores and their weighted sum take 2 * 2 * num_heads * head_dim FLOPs for each attended token, in every layer. A
    token of a sequence of length l attends to l / 2 tokens on average.
    """
    return 2.0 * shape.num_layers * shape.num_heads * shape.head_dim


def forward_flops(shape: ModelShape, lengths: NDArray[np.integer]) -> float:
    """Return the FLOPs of a forward pass over sequences with these lengths, int [sequences]."""
    tokens = np.asarray(lengths, np.float64)
    matrices = matrix_flops(shape) * tokens.sum()
    if not shape.windows:
        return float(matrices + attention_flops(shape) * np.square(tokens).sum())
    # Every window appears in many layers, so its pairs of tokens are counted once.
    pairs = sum(count * _attended(tokens, window) for window, count in Counter(shape.windows).items())
    return float(matrices + 4.0 * shape.num_heads * shape.head_dim * pairs)


def _attended(tokens: NDArray[np.float64], window: int) -> float:
    """Return the pairs of a token and an attended one over sequences of these lengths [sequences]; window 0 is none."""
    reach = np.minimum(tokens, window) if window else tokens
    return float((reach * tokens - np.square(reach) / 2).sum())
