"""NaN in an engine's live parameters before a copy. Elements still NaN after the copy were not written."""

from __future__ import annotations

import torch
from torch import Tensor

_NAN_BITS = 0x7F
"""Bits of NaN in the FP8 format e4m3, without the sign bit."""


def fill_with_nan(parameter: Tensor) -> None:
    """Fill a live parameter [*shape] with NaN; integers wider than a byte with -1."""
    if parameter.dtype.itemsize == 1:
        _bytes(parameter).fill_(_NAN_BITS)
    elif parameter.is_floating_point():
        parameter.data.fill_(float("nan"))
    else:
        parameter.data.fill_(-1)


def has_nan(parameter: Tensor) -> bool:
    """Return whether a parameter [*shape] has a NaN; False for integers wider than a byte."""
    if parameter.dtype.itemsize == 1:
        return bool(((_bytes(parameter) & _NAN_BITS) == _NAN_BITS).any())
    return bool(parameter.is_floating_point() and parameter.isnan().any())


def _bytes(parameter: Tensor) -> Tensor:
    """Return a uint8 view [*shape]: torch 2.13 has few operations on FP8."""
    return parameter.data.view(torch.uint8)
