"""Residual additions in the engine's arithmetic."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def wide_addition(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Return the function adding a layer's output [tokens, 1, hidden_size] to its residual [tokens, 1, hidden_size].

    Megatron calls this in each forward pass, as its own `get_bias_dropout_add`. The arguments have no effect, since
    exact models have neither biases nor dropout.
    """
    return _add


def _add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
    """Return the sum of a layer's output [tokens, 1, hidden_size] and its residual, float32 and not rounded.

    The residual [tokens, 1, hidden_size] is float32, from an earlier addition or the embedding. vLLM normalises the
    sum before it rounds it, and keeps the rounded sum as the next residual. So the sum stays wide for the norm, and
    this function rounds it when it comes back as a residual.
    """
    values, bias = output
    assert bias is None, "exact models have no biases in their linear layers"
    return values.float() + residual.to(values.dtype).float()
