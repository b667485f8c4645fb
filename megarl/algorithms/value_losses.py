"""Losses of a critic's values."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.policy_losses import LossAndMetrics

METRICS = {"critic/clipped": ("share", "tokens whose value critic.clip holds back")}
"""Names, units and meanings, for `tracking.table`."""


def clipped(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> LossAndMetrics:
    """Half the squared distance from the returns; of the value and the one held near its old value, the worse counts.

    All [tokens]; `clip` is how far a value may move, None lets it. Metric: `clipped`, 1 where the held one counts.
    Source: PPO's implementation (arXiv 1707.06347; described in arXiv 2005.12729, section 3).
    """
    loss = (values - returns).square() / 2
    if clip is None:
        return loss, {"clipped": torch.zeros_like(loss)}
    held = (old_values + (values - old_values).clamp(-clip, clip) - returns).square() / 2
    return torch.maximum(loss, held), {"clipped": (held > loss).float()}


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """The share of the returns' variance that the values foresaw: 1 - Var(returns - values) / Var(returns).

    Both float [tokens].
    """
    unforeseen = (returns - values).var(unbiased=False) / returns.var(unbiased=False).clamp(min=1e-12)
    return 1 - float(unforeseen)
