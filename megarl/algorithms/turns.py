"""Returns of the turns of a trajectory."""

from __future__ import annotations

import torch
from torch import Tensor


def turn_returns(rewards: Tensor, discount: float) -> Tensor:
    """Return each turn's reward plus `discount` times the return of the next turn: [samples, turns], like `rewards`.

    A sample with fewer turns has zeros after its last turn.
    """
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
    for turn in reversed(range(rewards.shape[1])):
        following = rewards[:, turn] + discount * following
        returns[:, turn] = following
    return returns
