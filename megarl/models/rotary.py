"""Frequencies of scaled rotary position embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.families.rotary import Rotary


def frequencies(rotary: Rotary, num_channels: int) -> Tensor:
    """Return the angle of each pair of channels per position, float32 [num_channels / 2], in radians.

    The formulas are those of transformers 5 and vLLM 0.30, in the same order of operations.
    """
    exponents = torch.arange(0, num_channels, 2, dtype=torch.float32) / num_channels
    plain = 1.0 / rotary.theta**exponents
    if rotary.scaling == "linear":
        return plain / rotary.factor
    if rotary.scaling == "llama3":
        return _llama3(plain, rotary)
    if rotary.scaling == "yarn":
        return _yarn(plain, 1.0 / (rotary.factor * rotary.theta**exponents), rotary, num_channels)
    return plain


def _llama3(plain: Tensor, rotary: Rotary) -> Tensor:
    """Return Llama 3.1's frequencies [pairs]: long wavelengths are divided by the factor, medium ones interpolated."""
    wavelengths = 2 * math.pi / plain
    longest = rotary.original_positions / rotary.low_factor
    shortest = rotary.original_positions / rotary.high_factor
    smooth = (rotary.original_positions / wavelengths - rotary.low_factor) / (rotary.high_factor - rotary.low_factor)
    medium = (1 - smooth) * plain / rotary.factor + smooth * plain
    scaled = torch.where(wavelengths > longest, plain / rotary.factor, medium)
    return torch.where(wavelengths < shortest, plain, scaled)


def _yarn(plain: Tensor, divided: Tensor, rotary: Rotary, num_channels: int) -> Tensor:
    """Return YaRN's frequencies [pairs] (arXiv:2309.00071, section 3.2): a linear ramp between unchanged frequencies
    and frequencies divided by the factor."""

    def pair_with(rotations: float) -> float:
        """Return the (real-valued) number of the channel pair with this many rotations over the original context."""
        turns = rotary.original_positions / (rotations * 2 * math.pi)
        return num_channels * math.log(turns) / (2 * math.log(rotary.theta))

    low, high = pair_with(rotary.beta_fast), pair_with(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_channels - 1)
    # An empty ramp would divide by zero.
    width = (high - low) or 0.001
    ramp = ((torch.arange(num_channels // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return divided * ramp + plain * (1 - ramp)
