"""Policy losses per token, on flat packed tensors.

A policy loss returns `(loss, metrics)`: the loss [tokens] and a dict of detached tensors, each [tokens] too, so that
whoever sums weight times loss can aggregate every metric in the same way, with the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.log_ratio import log_ratio


def ratio(policy_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Probability of each token under the policy over that before the update; [tokens] in and out."""
    return log_ratio(policy_logprobs, old_logprobs).exp()


def clip(ratios: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Ratios held within 1 - `clip_low` and 1 + `clip_high`; [tokens] in and out."""
    return ratios.clamp(1.0 - clip_low, 1.0 + clip_high)


def clipped(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate: minus the lesser of ratio * advantage and clipped ratio * advantage.

    All tensors [tokens]; gradient flows through `policy_logprobs` alone. With `dual_clip` (above 1) the loss of a
    negative advantage is at most `dual_clip` times its size. Metrics, per token: `ratio`, `clip_fraction` (1 where the
    clip holds the ratio, and so stops the gradient) and, with `dual_clip`, `dual_clip_fraction`.
    Source: PPO (arXiv 1707.06347, eq. 7); clip-higher: DAPO (arXiv 2503.14476, eq. 10);
    dual clip: arXiv 1912.09729, eq. 5.
    """
    advantages, old_logprobs = advantages.detach(), old_logprobs.detach()
    ratios = ratio(policy_logprobs, old_logprobs)
    unclipped = ratios * advantages
    bounded = clip(ratios, clip_low=clip_low, clip_high=clip_high) * advantages
    objective = torch.minimum(unclipped, bounded)
    metrics = {"ratio": ratios.detach(), "clip_fraction": (bounded < unclipped).to(ratios.dtype)}
    if dual_clip is not None:
        floor = dual_clip * advantages
        is_floored = (advantages < 0) & (objective < floor)
        objective = torch.where(is_floored, floor, objective)
        metrics["dual_clip_fraction"] = is_floored.to(ratios.dtype)
    return -objective, metrics


POLICY_LOSSES = {"clipped": clipped}
