"""Frequencies of rotary position embeddings as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.families.config_json.frequencies import scaled_frequencies
from megarl.families.config_json.rotary import Rotary


def frequencies(rotary: Rotary, num_channels: int) -> Tensor:
    """Return the angle of each pair of channels per position, float32 [num_channels / 2], in radians."""
    exponents = torch.arange(0, num_channels, 2, dtype=torch.float32) / num_channels
    pairs = torch.arange(num_channels // 2, dtype=torch.float32)
    return scaled_frequencies(rotary, num_channels, exponents, pairs, torch.where)
