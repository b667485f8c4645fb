"""Losses of a critic. A critic predicts returns."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.policy_losses import LossAndMetrics
from megarl.tracking.metric_rows import MetricRow

METRICS = (MetricRow("critic/clipped", "share", "fraction of tokens with a value limited by critic.clip"),)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> LossAndMetrics:
    """Return half the squared difference of values and returns, with PPO's clipping: [tokens].

    `values`, `old_values` and `returns` are [tokens]. A clipped value differs from its old value by at most `clip`;
    None: no clipping. The larger of both losses counts. Metric `clipped` is 1 where the clipped value's loss counts.

    Source: PPO's implementation (arXiv 1707.06347; described in arXiv 2005.12729, section 3).
    """
    loss = (values - returns).square() / 2
    if clip is None:
        return loss, {"clipped": torch.zeros_like(loss)}
    clipped_loss = (old_values + (values - old_values).clamp(-clip, clip) - returns).square() / 2
    return torch.maximum(loss, clipped_loss), {"clipped": (clipped_loss > loss).float()}


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return the fraction of the returns' variance that the values explain: 1 - Var(returns - values) / Var(returns).

    Both are float [tokens].
    """
    # 1e-12 avoids a division by zero for constant returns.
    unexplained_share = (returns - values).var(unbiased=False) / returns.var(unbiased=False).clamp(min=1e-12)
    return 1 - float(unexplained_share)
