"""Advantages of samples from their rewards."""

from __future__ import annotations

import torch
from torch import Tensor


def grpo(rewards: Tensor, groups: Tensor, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Reward minus the mean of its group, over the group's unbiased standard deviation plus `epsilon`.

    `rewards` float [samples]; `groups` int [samples], equal numbers form a group, in any order. Returns [samples].
    A group of one sample, or whose rewards are all equal, has advantages of exactly zero.
    Source: DeepSeekMath (arXiv 2402.03300, section 4.1.2); without the deviation, Dr. GRPO (arXiv 2503.20783).
    """
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    sizes = sizes.to(rewards.dtype)
    per_group = torch.zeros_like(sizes)
    centered = rewards - (per_group.index_add(0, group, rewards) / sizes)[group]
    # A rounded mean of equal rewards need not equal them, and a tiny deviation would blow the rest up.
    lowest = per_group.scatter_reduce(0, group, rewards, "amin", include_self=False)
    highest = per_group.scatter_reduce(0, group, rewards, "amax", include_self=False)
    centered = centered.masked_fill((lowest == highest)[group], 0.0)
    if not normalize_by_std:
        return centered
    variance = per_group.index_add(0, group, centered.square()) / (sizes - 1).clamp(min=1)
    return centered / (variance.sqrt()[group] + epsilon)


ADVANTAGES = {"grpo": grpo}
