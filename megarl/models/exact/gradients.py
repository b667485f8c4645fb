"""Combines two computations into one tensor: the values of the first, the gradient of the second."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_gradient_of(gradient_source: Tensor, exact: Tensor) -> Tensor:
    """Return the values of `exact` [*shape] with the gradient of exact + gradient_source. `exact` may be detached."""
    return _AddGradientOf.apply(gradient_source, exact)


class _AddGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient_source: Tensor, exact: Tensor) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]
