"""Advantages of self-play: baselines of roles, against float64 loops, in any order, and over a save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config import AlgorithmConfig
from megarl.environments import Start
from megarl.environments.validation import copy_valid_start
from megarl.rollout.state import RLState
from megarl.rollout.step.advantages import weigh_batch
from megarl.rollout.step.rl_batch import RLBatch
from megarl.types import ConfigError, Trajectory
from tests.rollout.batches import attempt, batch_of, of_sequences, recipe

RAE = {"advantage": "rae"}
MIXTURE = {name: {"weight": 1, "data": {"train": "t"}} for name in ("chess", "go")}


def play(random: np.random.Generator, step: int) -> list[list[Trajectory]]:
    """Groups of one step: random rewards, roles of two sources, some attempts without a score."""
    groups = []
    for place in range(random.integers(1, 4)):
        group = []
        for number in range(random.integers(1, 5)):
            trajectory = attempt(10 * step + place, float(random.normal()), int(random.integers(1, 4)))
            role, source = str(random.choice(["first", "second"])), str(random.choice(["chess", "go"]))
            trajectory = replace(trajectory, number=number, role=role, environment=source)
            group.append(replace(trajectory, reward=None) if random.random() < 0.2 else trajectory)
        groups.append(group)
    return groups


def advantages_of(batch: RLBatch, baselines: dict[str, float], decay: float) -> list[float]:
    """The advantage of each sample, the same for all of its tokens."""
    played = recipe(algorithm=RAE | {"role_decay": decay}, mixture=MIXTURE)
    metrics = weigh_batch(batch, played, 0, 0.0, baselines)
    assert {name.removeprefix("advantages/baseline/"): metrics[name] for name in metrics} == baselines
    values = []
    for found in of_sequences(batch, "advantages"):
        assert found[:2] == [0, 0] and len(set(found[2:])) == 1
        values.append(found[2])
    return values


@pytest.mark.parametrize("seed", range(50))
def test_random_games(seed: int) -> None:
    """Also in another order of the groups and of their attempts: samples count by their numbers."""
    random = np.random.default_rng(seed)
    decay = float(random.choice([0.0, 0.5, 0.95]))
    expected_baselines: dict[str, float] = {}
    baselines: dict[str, float] = {}
    shuffled_baselines: dict[str, float] = {}
    for step in range(3):
        groups = play(random, step)
        expected = {}
        for group in groups:
            for t in group:
                name = f"{t.environment}.{t.role}"
                if t.reward is None:
                    expected[t.group, t.number] = 0.0
                    continue
                before = expected_baselines.get(name, 0.0)
                expected[t.group, t.number] = t.reward.score - before
                expected_baselines[name] = decay * before + (1 - decay) * t.reward.score
        batch = RLBatch.from_groups(groups)
        found = advantages_of(batch, baselines, decay)
        assert found == pytest.approx([expected[sample] for sample in batch.sample_ids], abs=1e-6)
        assert baselines == pytest.approx(expected_baselines, rel=1e-12)
        order = random.permutation(len(groups))
        shuffled = RLBatch.from_groups([groups[place][::-1] for place in order])
        found = advantages_of(shuffled, shuffled_baselines, decay)
        assert found == pytest.approx([expected[sample] for sample in shuffled.sample_ids], abs=1e-6)
        assert shuffled_baselines == baselines


def test_baselines_are_saved_bit_equal_and_a_failed_step_changes_none(tmp_path: Path) -> None:
    state = RLState(AlgorithmConfig.model_validate(RAE))
    state.begin_step(repeats_draws=False)
    state.role_baselines["go/first"] = 0.1 + 0.2
    state.save(tmp_path)
    resumed = RLState(AlgorithmConfig.model_validate(RAE))
    resumed.load(tmp_path, lambda *_: pytest.fail("no trajectory was saved"))
    assert resumed.role_baselines == {"go/first": 0.1 + 0.2}
    resumed.begin_step(repeats_draws=False)
    resumed.role_baselines["go/first"] = 7.0
    resumed.forget_step()
    assert resumed.role_baselines == {"go/first": 0.1 + 0.2}


def test_without_a_mixture_a_baseline_has_the_role_s_name() -> None:
    """The environment's path may change from start to start."""
    baselines: dict[str, float] = {}
    weigh_batch(batch_of([replace(attempt(0, 1.0, 2), role="first")]), recipe(algorithm=RAE), 0, 0.0, baselines)
    assert baselines == pytest.approx({"first": 0.05})


def test_a_sample_without_a_role_is_refused() -> None:
    batch = batch_of([attempt(0, 1.0, 2)])
    with pytest.raises(ConfigError, match=r"algorithm\.advantage = rae: environment single_turn named no role;"):
        weigh_batch(batch, recipe(algorithm=RAE), 0, 0.0, {})


@pytest.mark.parametrize("role", ["", "a/b", "two words", 3])
def test_a_role_is_a_name(role: object) -> None:
    with pytest.raises(TypeError, match="returned a role that is not a name"):
        copy_valid_start(Start((), role=role))  # type: ignore[arg-type]
    assert copy_valid_start(Start((), role="player-1")).role == "player-1"
