"""Advantages of turns among those that act in the same state, against float64 loops."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.rollout.step.advantages import compute_advantages
from megarl.types import ConfigError, Trajectory
from tests.rollout.batches import batch_of, of_sequences, recipe
from tests.rollout.step.test_batch_advantages import episode, turns

ENVIRONMENT = {"rollout": {"environment": "games.py:Game"}}


def in_states(trajectory: Trajectory, states: str) -> Trajectory:
    return replace(trajectory, turn_states=tuple(states))


def advantages_by_loops(trajectories: list[Trajectory], weight: float, discount: float) -> list[list[float]]:
    """The advantage of each turn of each trajectory: the sample's centred reward, and its turn's among equal states."""
    rewards: list[list[float]] = []
    returns: dict[tuple[int, str | None], list[float]] = defaultdict(list)
    scores: dict[int, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        of_turns = [0.0] * trajectory.num_turns
        for turn, reward in trajectory.turn_rewards:
            of_turns[turn] = reward
        if trajectory.reward is not None:
            of_turns[-1] += trajectory.reward.score - sum(of_turns)
            scores[trajectory.group].append(trajectory.reward.score)
        discounted = [
            sum(discount ** (later - turn) * of_turns[later] for later in range(turn, len(of_turns)))
            for turn in range(len(of_turns))
        ]
        rewards.append(discounted)
        if trajectory.reward is not None:
            for state, value in zip(trajectory.turn_states, discounted, strict=True):
                returns[trajectory.group, state].append(value)
    expected = []
    for trajectory, discounted in zip(trajectories, rewards, strict=True):
        if trajectory.reward is None:
            expected.append([0.0] * len(discounted))
            continue
        whole = trajectory.reward.score - float(np.mean(scores[trajectory.group]))
        expected.append(
            [
                whole + weight * (value - float(np.mean(returns[trajectory.group, state])))
                for state, value in zip(trajectory.turn_states, discounted, strict=True)
            ]
        )
    return expected


@pytest.mark.parametrize("seed", range(50))
def test_random_episodes(seed: int) -> None:
    random = np.random.default_rng(seed)
    trajectories = []
    for group in range(3):
        for _ in range(random.integers(1, 6)):
            trajectory = episode(random, group)
            if random.random() < 0.2:
                trajectory = replace(trajectory, reward=None)
            # Few states, so that turns meet others of their trajectory, of their prompt and of other prompts.
            trajectories.append(in_states(trajectory, "".join(random.choice(list("abc"), trajectory.num_turns))))
    weight, discount = float(random.uniform(0.1, 2)), float(random.choice([0.0, 0.5, 0.95, 1.0]))
    batch = batch_of(trajectories)
    algorithm: dict[str, Any] = {"normalize_by_std": False, "state_weight": weight, "state_discount": discount}
    compute_advantages(batch, recipe(algorithm=algorithm, **ENVIRONMENT), 0.0)
    samples = np.repeat(batch.samples, batch.lengths)
    expected = advantages_by_loops(trajectories, weight, discount)
    for token, (turn, sample) in enumerate(zip(batch.turns, samples, strict=True)):
        value = expected[sample][turn] if batch.loss_mask[token] else 0.0
        assert batch.per_token["advantages"][token] == pytest.approx(value, abs=1e-6)


def test_a_lone_state_and_another_prompt_s_state_add_nothing() -> None:
    """States a meet, b is alone, and c of the first prompt is not c of the second."""
    trajectories = [
        in_states(turns(0, [1.0, 0.0]), "ab"), in_states(turns(0, [0.0, 0.0]), "ac"),
        in_states(turns(1, [5.0]), "c"), in_states(turns(1, [5.0]), "d"),
    ]  # fmt: skip
    batch = batch_of(trajectories)
    preset = recipe(algorithm={"preset": "gigpo"}, **ENVIRONMENT)
    assert (preset.algorithm.state_weight, preset.algorithm.state_discount) == (1.0, 0.95)
    compute_advantages(batch, preset, 0.0)
    assert of_sequences(batch, "advantages") == [
        [0, 1.0, 1.0, 0, 0.5, 0.5], [0, -1.0, -1.0, 0, -0.5, -0.5], [0, 0, 0], [0, 0, 0],
    ]  # fmt: skip


def test_a_turn_without_a_state_is_refused() -> None:
    unnamed = replace(turns(0, [1.0, 0.0]), turn_states=("a", None))
    batch = batch_of([unnamed, in_states(turns(0, [0.0, 0.0]), "ab")])
    with pytest.raises(ConfigError, match=r"algorithm\.state_weight = 1: environment game named no state for turn 1;"):
        compute_advantages(batch, recipe(algorithm={"state_weight": 1.0}, **ENVIRONMENT), 0.0)
