"""Layers of experts that replace Megatron's own in the local spec."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor


class OwnOutput(RowParallelLinear):
    """The second layer of an expert with biases.

    Its output [tokens, hidden_size] has memory of its own. Megatron-Core 0.16.1 adds the bias in place, which torch
    refuses for the view that Megatron's layer returns.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Any]:
        output, bias = super().forward(input_)
        return output.clone(), bias


def has_router(layer: Any) -> bool:
    return hasattr(layer.mlp, "router")
