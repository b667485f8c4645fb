"""Losses of a critic's values."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.policy_losses import LossAndMetrics

METRICS = {"critic/clipped": ("share", "fraction of tokens with a value limited by critic.clip")}
"""Metrics reported by this module: unit and meaning by metric name. `megarl metrics` lists them."""


def clipped(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> LossAndMetrics:
    """Return half the squared distance of the values from the returns, with clipping: [tokens].

    `values`, `old_values` and `returns` are [tokens]. `clip` is the largest move of a value from its old value; None
    allows any. The larger loss of the value and the clipped value counts. Metric: `clipped`, 1 where the clipped one
    counts.

    Source: PPO's implementation (arXiv 1707.06347; described in arXiv 2005.12729, section 3).
    """
    loss = (values - returns).square() / 2
    if clip is None:
        return loss, {"clipped": torch.zeros_like(loss)}
    clamped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square() / 2
    return torch.maximum(loss, clamped), {"clipped": (clamped > loss).float()}


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return the explained fraction of the returns' variance: 1 - Var(returns - values) / Var(returns).

    Both arguments are float [tokens].
    """
    # 1e-12 avoids a division by zero for constant returns.
    unforeseen = (returns - values).var(unbiased=False) / returns.var(unbiased=False).clamp(min=1e-12)
    return 1 - float(unforeseen)
