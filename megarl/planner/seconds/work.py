"""A model's work in a few numbers: FLOPs per token and weights, by part."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from megarl.families.flops import forward_flops, matrix_flops
from megarl.families.model_tensors import hf_tensors
from megarl.families.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """FLOPs of a token's forward pass, and numbers of weights. Experts are separate."""

    shape: ModelShape
    num_layers: int
    num_expert_layers: int
    layer_flops: float
    """FLOPs of all layers per token: matrix products, without experts and attention scores."""
    expert_flops: float
    """FLOPs of the chosen experts of all layers per token."""
    head_flops: float
    layer_weights: int
    """Weights of all layers without experts."""
    expert_weights: int
    embedding_weights: int
    """Weights of the embedding and, if not tied, of the head."""

    @property
    def weights(self) -> int:
        return self.layer_weights + self.expert_weights + self.embedding_weights

    @property
    def num_attention_layers(self) -> int:
        """Layers with a KV cache; all other layers have linear attention."""
        return sum(kind.mixer == "attention" for kind in self.shape.layers)

    def attended_tokens(self, context: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how many cached tokens a new token attends to, summed over layers: [n].

        `context` [n]: tokens already in the cache. A window limits it per layer.
        """
        windows = Counter(kind.window for kind in self.shape.layers if kind.mixer == "attention")
        tokens_by_window = (
            count * (np.minimum(context, window) if window else context) for window, count in windows.items()
        )
        return np.sum([*tokens_by_window], axis=0)

    def score_flops(self, lengths: NDArray[np.floating]) -> float:
        """Return the FLOPs of attention scores per token, averaged over sequences of `lengths` [sequences]."""
        tokens = np.asarray(lengths).astype(np.int64)
        return forward_flops(self.shape, tokens) / max(1, int(tokens.sum())) - matrix_flops(self.shape)


@cache
def model_work(shape: ModelShape) -> ModelWork:
    """Count a model's weights by kind, and its FLOPs per token."""
    expert_weights = embedding_weights = layer_weights = 0
    for name, size in hf_tensors(shape).items():
        numel = prod(size)
        if ".experts." in name:
            expert_weights += numel
        elif "embed_tokens" in name or "lm_head" in name:
            embedding_weights += numel
        else:
            layer_weights += numel
    num_expert_layers = len(shape.expert_layers)
    # A gated expert has three matrices.
    expert_flops = 2.0 * 3 * shape.hidden_size * shape.moe_intermediate_size * shape.top_k * num_expert_layers
    head_flops = 2.0 * shape.hidden_size * (1 if shape.has_value_head else shape.vocab_size)
    return ModelWork(
        shape=shape,
        num_layers=shape.num_layers,
        num_expert_layers=num_expert_layers,
        layer_flops=matrix_flops(shape) - expert_flops - head_flops,
        expert_flops=expert_flops,
        head_flops=head_flops,
        layer_weights=layer_weights,
        expert_weights=expert_weights,
        embedding_weights=embedding_weights,
    )
