"""Places of single experts' tensors in the packed tensors of a checkpoint. A packed tensor has all experts of a
layer.
"""

from __future__ import annotations

from typing import NamedTuple


class Axis(NamedTuple):
    """One dimension of an expert's tensor in the packed tensor: index i is index `start + i * step` of dimension
    `dim`.
    """

    dim: int
    start: int = 0
    step: int = 1


class Alias(NamedTuple):
    """An expert's tensor inside a packed tensor. The packed tensor's first dimension counts the experts."""

    tensor: str
    """Name of the expert's tensor, with `{layer}` and `{expert}` for numbers."""
    packed: str
    """Name of the packed tensor in files, with `{layer}`."""
    packed_shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    """Place of each dimension of the expert's tensor in the packed tensor, which has one dimension more."""
