"""Returns of the turns of a trajectory."""

from __future__ import annotations

import torch
from torch import Tensor


def turn_returns(rewards: Tensor, discount: float) -> Tensor:
    """Each turn's reward plus `discount` times the return of the next: [samples, turns] in and out.

    A sample of fewer turns has zeros behind its last.
    """
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
    for turn in reversed(range(rewards.shape[1])):
        following = rewards[:, turn] + discount * following
        returns[:, turn] = following
    return returns
