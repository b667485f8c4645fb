"""Limits of comparisons in float32: what the oracle itself loses in float32, measured in the same test."""

from __future__ import annotations

import torch

MARGIN = 3.0
"""Factor by which another order of the same sums may lose more than the oracle. Processors differ by less."""


def allowed_error(in_float32: torch.Tensor, in_float64: torch.Tensor) -> float:
    """The largest error allowed to a float32 computation of what the oracle computed in both types."""
    error = (in_float32.double() - in_float64.double()).abs().max().item()
    assert 0 < error < 1e-4, f"the oracle's own error in float32, {error:g}, is no rounding"
    return MARGIN * error
