"""Layers of experts that replace Megatron's own in the local spec."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor


class OwnOutput(RowParallelLinear):
    """The second layer of an expert with biases. It returns a tensor with memory of its own: [tokens, hidden_size].

    Megatron-Core 0.16.1 adds the bias in place. Its own layer's output is a view made by a custom autograd function,
    and torch refuses the backward pass after such a change.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Any]:
        output, bias = super().forward(input_)
        return output.clone(), bias


def has_router(layer: Any) -> bool:
    return hasattr(layer.mlp, "router")
