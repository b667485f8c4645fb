"""Combines two computations into one tensor: the values of the first, the gradient of the second."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_gradient_of(usual: Tensor, exact: Tensor) -> Tensor:
    """Return the values of `exact` [*shape] with the gradient of exact + usual. `exact` may be detached."""
    return _WithGradientOf.apply(usual, exact)


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, usual: Tensor, exact: Tensor) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]
