"""Step-level advantages of GiGPO."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.advantages import state_advantages, turn_returns
from megarl.algorithms.sequences import broadcast_to_tokens
from megarl.config import AlgorithmConfig
from megarl.rollout.step.rl_batch import RLBatch
from megarl.types import ConfigError


def weighted_state_advantages(turn_rewards: Tensor, batch: RLBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Return `algorithm.state_weight` times the advantage of each token's turn within its step group, [tokens].

    A step group has the turns of one prompt's scored samples that act in the same state. `turn_rewards` are float64
    [samples, turns]. Raises ConfigError if a turn of a scored sample has no state.
    """
    _refuse_missing_states(batch, algorithm)
    # -1: no group. An unscored sample's return would shift its group's mean.
    state_groups = torch.from_numpy(np.where(batch.is_scored[:, None], batch.state_groups, -1))
    turn_advantages = state_advantages(turn_returns(turn_rewards, algorithm.state_discount), state_groups)
    turns, cu_samples = torch.from_numpy(batch.turns), torch.from_numpy(batch.cu_samples)
    advantages = torch.zeros(len(turns), dtype=turn_rewards.dtype)
    for turn in range(turn_advantages.shape[1]):
        token_values = broadcast_to_tokens(turn_advantages[:, turn], cu_samples, len(turns))
        advantages = torch.where(turns == turn, token_values, advantages)
    return algorithm.state_weight * advantages


def _refuse_missing_states(batch: RLBatch, algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError if a turn of a scored sample has no state."""
    is_turn = np.arange(batch.state_groups.shape[1]) < batch.num_turns[:, None]
    missing_states = np.argwhere(is_turn & batch.is_scored[:, None] & (batch.state_groups < 0))
    if len(missing_states):
        sample, turn = missing_states[0]
        raise ConfigError(
            f"algorithm.state_weight = {algorithm.state_weight:g}: environment {batch.environments[sample]} named no "
            f"state for turn {turn}; return it as state in Start and in each Step, or set algorithm.state_weight=0"
        )
