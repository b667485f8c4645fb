"""Sampling ahead of training: the bound of staleness, the order of training, and where every group is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.state import RLState, draw_of
from megarl.types import Group, MegarlError
from tests.rollout.simulated import Simulation
from tests.rollout.virtual_time import VirtualLoop

PROMPTS = 16


def recipe_of(steps: int, rollout: dict[str, Any], **algorithm: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t", "shuffle": False},
            "train": {"prompts_per_step": PROMPTS, "samples_per_prompt": 2, "steps": steps}, "seed": 7,
            "algorithm": {"importance_sampling": "tis", **algorithm},
            "rollout": {"placement": "separate", **rollout},
        }
    )  # fmt: skip


def run(simulation: Simulation, *ends: int, check: Any) -> None:
    """The steps of a run that is killed after each of these and goes on from its checkpoint."""
    first = len({number for number, _, _ in simulation.given}) + 1
    for last in ends:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(simulation.run(first, last, check))
        first = last + 1


def oldest(group: Group) -> int:
    return min(trajectory.oldest_version for trajectory in group)


def check_accounts(simulation: Simulation, state: RLState, buffer: GroupBuffer) -> None:
    """Every group is in one place, and no more are under way than can be trained in time."""
    rollout = simulation.recipe.rollout
    started, waiting = {*state.started}, {draw_of(group) for group in state.waiting}
    assert not started & waiting and state.drawn == state.used + state.num_dropped + len(started) + len(waiting)
    assert state.used in (len(simulation.given), len(simulation.given) + PROMPTS)
    assert len(started) + len(waiting) <= PROMPTS * (1 + rollout.staleness_bound)
    assert state.drawn - state.num_dropped <= PROMPTS * simulation.recipe.train.steps
    metrics = buffer.metrics()
    assert metrics["staleness/dropped"] == 0 and metrics["staleness/span/max"] <= rollout.staleness_bound


@pytest.mark.parametrize(
    ("staleness", "sync_every", "dynamic_sampling"),
    [
        pytest.param(1, 1, None, marks=pytest.mark.long),
        pytest.param(1, 1, (0.0, 1.0), marks=pytest.mark.long),
        (4, 1, None),
        (3, 3, (0.0, 1.0)),
    ],
)
def test_of_ten_thousand_groups_each_is_trained_once_in_order_within_the_bound(
    tmp_path: Path, staleness: int, sync_every: int, dynamic_sampling: tuple[float, float] | None
) -> None:
    steps = 10_000 // 5 // PROMPTS
    rollout = {"max_staleness": staleness, "sync_every": sync_every}
    simulation = Simulation(recipe_of(steps, rollout, dynamic_sampling=dynamic_sampling), tmp_path, seed=staleness)
    run(simulation, 1, 8, 50, 90, steps, check=check_accounts)

    trained = [group[0].problem.index for _, _, group in simulation.given]
    passing = [n for n in range(2 * len(trained)) if dynamic_sampling is None or n % 5]
    assert trained == passing[: steps * PROMPTS]
    ages = [number - oldest(group) for number, _, group in simulation.given]
    assert max(ages) == staleness and min(ages) >= 0
    assert all(oldest(group) <= engines <= number for number, engines, group in simulation.given)
    for _, _, group in simulation.given:
        for trajectory in group:
            [segment] = trajectory.segments
            assert segment.old_logprobs is not None and (segment.old_logprobs == -2.0 * segment.loss_mask).all()
            versions = segment.weight_versions[segment.loss_mask]
            assert (np.diff(versions) >= 0).all()
            assert len(versions) == sum(simulation.lengths(trajectory.problem.index, trajectory.number))


def test_sampling_ahead_keeps_both_sides_busy(tmp_path: Path) -> None:
    """One step off needs less time than taking turns, by what the shorter of the two needs."""
    seconds: dict[int, float] = {}
    for staleness in (0, 1):
        simulation = Simulation(recipe_of(30, {"max_staleness": staleness}), tmp_path, seed=3)
        run(simulation, 30, check=check_accounts if staleness else lambda *_: None)
        seconds[staleness] = simulation.seconds
    assert seconds[1] < 0.8 * seconds[0]


def test_a_lower_bound_drops_what_is_too_old_for_it(tmp_path: Path) -> None:
    simulation = Simulation(recipe_of(40, {"max_staleness": 6}), tmp_path, seed=1)
    run(simulation, 20, check=check_accounts)
    dropped: list[float] = []

    def note(simulation: Simulation, state: RLState, buffer: GroupBuffer) -> None:
        assert state.drawn == state.used + state.num_dropped + len(state.started) + len(state.waiting)
        dropped.append(buffer.metrics()["staleness/dropped"])
        assert state.num_dropped >= dropped[0]

    simulation.recipe = recipe_of(40, {"max_staleness": 1})
    run(simulation, 40, check=note)
    trained = [(number, group) for number, _, group in simulation.given]
    assert dropped[0] > 0 and sum(dropped[1:]) == 0
    assert max(number - oldest(group) for number, group in trained if number > 20) == 1
    order = [group[0].problem.index for _, group in trained]
    assert order == sorted(set(order))


def starved(steps: int) -> Iterator[Recipe]:
    for staleness in (0, 2):
        yield recipe_of(steps, {"max_staleness": staleness}, dynamic_sampling=(0.0, 0.25), max_attempts=3)


def test_a_filter_that_nothing_passes_ends_the_run(tmp_path: Path) -> None:
    for recipe in starved(5):
        with pytest.raises(MegarlError, match=r"gave 0 of 16 groups whose accuracy .* algorithm\.dynamic_sampling"):
            run(Simulation(recipe, tmp_path, seed=2), 5, check=check_accounts)
