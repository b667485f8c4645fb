"""Layers of experts that replace Megatron's own in the local spec."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor


class OwnOutput(RowParallelLinear):
    """The second layer of an expert with biases. Its output is a tensor of its own: [tokens, hidden_size].

    Megatron-Core 0.16.1 adds the bias to the output in place. Its own layer's output is a view made by a custom
    autograd function, and torch refuses the backward pass through such a change.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Any]:
        output, bias = super().forward(input_)
        return output.clone(), bias


def has_router(layer: Any) -> bool:
    """Return whether a layer of a live model has a router."""
    return hasattr(layer.mlp, "router")
