"""Weights in MXFP4 (OCP microscaling, version 1.0): groups of 32 four-bit numbers with a common power of two."""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values of e2m1: two bits of exponent, one of mantissa. A fourth bit is the sign."""

_SCALE_BIAS, _NAN = 127, 255
"""A scale byte (e8m0) is the exponent of two plus the bias, or NaN."""


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return weights in bfloat16, [..., 32 * groups]. They are exact, except for underflow and overflow of bfloat16.

    Shapes: `blocks` uint8 [..., groups, 16] has two numbers a byte, the lower four bits first. `scales` uint8 [...,
    groups] has one exponent a group. A group with the scale 255 becomes NaN, as the format defines.
    """
    numbers = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)])
    # Look up both numbers of a byte in one table, instead of separating its bits.
    byte_values = torch.arange(256)
    numbers_of_byte = torch.stack([numbers[byte_values & 15], numbers[byte_values >> 4]], dim=-1)
    values = numbers_of_byte[blocks.int()].flatten(-2)
    exponents = scales.int().unsqueeze(-1)
    # As an exponent, 255 would make small numbers finite: 0.5 * 2^128.
    weights = torch.ldexp(values, exponents - _SCALE_BIAS).masked_fill(exponents == _NAN, torch.nan)
    return weights.bfloat16().flatten(-2)
