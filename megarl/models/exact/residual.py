"""Residual additions in the engine's arithmetic."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def wide_addition(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Return the function that adds a layer's output [tokens, 1, hidden_size] to its residual of the same shape.

    It replaces Megatron's `get_bias_dropout_add`. The arguments have no effect: exact models have no biases or dropout.
    """
    return _add_residual


def _add_residual(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
    """Return the unrounded float32 sum of a layer's output and the rounded residual, all [tokens, 1, hidden_size].

    vLLM normalises the unrounded sum, and keeps the rounded sum as the next residual. So the sum stays float32 here. It
    is rounded when it comes back as the residual.
    """
    values, bias = output
    assert bias is None, "exact models have no biases in their linear layers"
    return values.float() + residual.to(values.dtype).float()
