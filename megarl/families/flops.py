"""Model FLOPs of a forward pass, by a model's shape; no torch.

A product of two numbers and its addition are two FLOPs. Counted are the matrix products of projections, feed-forward
layers (of experts, those that a token takes), routers, output head, and causal attention; not norms and activations,
and nothing that is computed twice to save memory. Source: PaLM (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megarl.families.shape import ModelShape


def matrix_flops(shape: ModelShape) -> float:
    """FLOPs of the matrix products of one token, attention's own left out: two for each weight that it meets."""
    channels = shape.num_heads * shape.head_dim
    projections = 2 * shape.hidden_size * (channels + shape.num_kv_heads * shape.head_dim)
    feed_forward = shape.intermediate_size
    if shape.num_experts:
        feed_forward = shape.top_k * shape.moe_intermediate_size + shape.shared_intermediate_size
    layer = projections + shape.hidden_size * (3 * feed_forward + shape.num_experts)
    head = shape.hidden_size * (1 if shape.has_value_head else shape.vocab_size)
    return 2.0 * (shape.num_layers * layer + head)


def attention_flops(shape: ModelShape) -> float:
    """FLOPs of causal attention by the square of a sequence's length in tokens.

    Scores and their weighted sum take 2 * 2 * num_heads * head_dim FLOPs for each of the l / 2 tokens that one of l
    sees on average, in every layer.
    """
    return 2.0 * shape.num_layers * shape.num_heads * shape.head_dim


def forward_flops(shape: ModelShape, lengths: NDArray[np.integer]) -> float:
    """FLOPs of a forward pass over sequences of these lengths, int [sequences]."""
    tokens = np.asarray(lengths, np.float64)
    return float(matrix_flops(shape) * tokens.sum() + attention_flops(shape) * np.square(tokens).sum())
