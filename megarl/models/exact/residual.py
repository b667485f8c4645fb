"""Residual additions in the engine's arithmetic."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def wide_addition(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Return the function adding a layer's output [tokens, 1, hidden_size] to its residual [tokens, 1, hidden_size].

    Megatron calls this in each forward pass, as its own `get_bias_dropout_add`. The arguments have no effect: exact
    models have neither biases nor dropout.
    """
    return _add


def _add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
    """Round the residual to the output's dtype, and return its sum with a layer's output, in float32 and not rounded.

    All three are [tokens, 1, hidden_size]. vLLM normalises the unrounded sum, but keeps the rounded sum as the next
    residual. Here the norm gets the float32 sum, which is rounded when it is passed in as the next residual.
    """
    values, bias = output
    assert bias is None, "exact models have no biases in their linear layers"
    return values.float() + residual.to(values.dtype).float()
