"""Each prompt of an epoch is drawn once, and has one ending, over any number of kills and restarts."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.config import Recipe
from megarl.data.sampler import DataOrder
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.buffer_policy import BufferPolicy
from megarl.rollout.source import Source
from megarl.rollout.state import RLState, problem_lookup
from megarl.tracking.draws import LEDGER, Account, account, rewind
from megarl.tracking.run_folder import _remove_later_lines
from megarl.types import Problem
from tests.rollout.simulated import PROMPT, Engines, Sampler
from tests.rollout.virtual_time import VirtualLoop

STEPS, PROMPTS, EVERY = 15, 4, 3
CURRICULUM = {"band": [0.1, 0.9], "outside": 0.2, "memory": 0.0}
MIXTURE = {
    "often": {"weight": 3, "data": {"train": "t"}},
    "rarely": {"data": {"train": "t", "curriculum": CURRICULUM}},
}
SIZES = {"often": 13, "rarely": 7, "single_turn": 17}
ALGORITHMS = [{}, {"dynamic_sampling": [0.0, 1.0], "oversampling": 1.5, "max_attempts": 50}]
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "continuing stragglers": {"stragglers": "park"},
    "aborted stragglers": {"stragglers": "abort"},
    "sampling ahead": {"placement": "separate", "ranks": 1, "max_staleness": 2},
    "dropping the stale": {"stragglers": "park", "max_staleness": 1, "on_stale": "drop"},
}


class KilledRun:
    """A run whose driver is killed at random moments, and resumed from its newest checkpoint."""

    def __init__(self, folder: Path, recipe: Recipe, seed: int, kill_share: float) -> None:
        self.folder, self.recipe = folder, recipe
        self.random, self.kill_share = random.Random(seed), kill_share
        self.seed, self.saved, self.num_kills = seed, 0, 0
        self.problems = {
            source.name: [
                Problem(n, (), tuple(PROMPT.tolist()), "7", source=source.name) for n in range(SIZES[source.name])
            ]
            for source in recipe.sources
        }

    def finish(self) -> Account:
        while self.saved < STEPS:
            loop = VirtualLoop()
            try:
                loop.run_until_complete(self._live())
            finally:
                loop.close()
        return account(self.folder)

    async def _live(self) -> None:
        """Train until a kill, or to the end."""
        engines, state, ledger = Engines(), RLState(self.recipe.algorithm), self.folder / LEDGER
        # As a start of the run does.
        _remove_later_lines(ledger, self.saved)
        if self.saved:
            state.load(self.folder / "saved", problem_lookup(self.problems))
            rewind(ledger, state.draws.num_written)
        sources = [
            Source(of.name, of.weight, of.recipe, self._sampler(engines), self.problems[of.name])
            for of in self.recipe.sources
        ]
        buffer = GroupBuffer(self.recipe, sources, state, BufferPolicy.from_recipe(self.recipe))
        sizes = {name: len(problems) for name, problems in self.problems.items()}
        for step in range(self.saved + 1, STEPS + 1):
            engines.pause()
            engines.resume(step)
            await buffer.take(PROMPTS, step)
            if self.random.random() < 0.2 and not buffer.policy.is_synchronous:
                # A signal before the update: the groups wait again.
                state.forget_step()
                await buffer.take(PROMPTS, step)
            await asyncio.sleep(self.random.lognormvariate(3.0, 0.8))
            if self._is_killed():
                break
            if step % EVERY == 0 or step == STEPS:
                shutil.rmtree(self.folder / "saved", ignore_errors=True)
                (self.folder / "saved").mkdir()
                state.save(self.folder / "saved")
                self.saved = step
                # Engines sample on: the ledger's line gets events that the checkpoint does not have.
                await asyncio.sleep(self.random.lognormvariate(3.0, 0.8))
                if step < STEPS and self._is_killed():
                    break
            num_open = len(state.started) + len(state.waiting)
            state.draws.write(ledger, step, sizes, num_open, too_long=0)
            if step < STEPS and self._is_killed():
                break
        await buffer.aclose()

    def _is_killed(self) -> bool:
        is_killed = self.random.random() < self.kill_share
        self.num_kills += is_killed
        return is_killed

    def _sampler(self, engines: Engines) -> Any:
        def lengths(problem: int, number: int) -> list[int]:
            own = random.Random(f"{self.seed} {problem} {number}")
            return [1 + int(own.lognormvariate(2.5, 1.2)) for _ in range(own.randint(1, 2))]

        return Sampler(engines, lengths, lambda problem: problem % 5 == 0)


def recipe_of(mode: str, algorithm: dict[str, Any], mixture: dict[str, Any]) -> Recipe:
    data = {"mixture": mixture} if mixture else {"data": {"train": "t"}}
    asynchronous = {"importance_sampling": "tis"} if MODES[mode] else {}
    return Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, **data, "seed": 7, "rollout": MODES[mode],
            "train": {"steps": STEPS, "prompts_per_step": PROMPTS, "samples_per_prompt": 2},
            "algorithm": {**algorithm, **asynchronous},
        }
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 10_000),
    kill_share=st.sampled_from([0.0, 0.1, 0.25]),
    algorithm=st.sampled_from(ALGORITHMS),
    mixture=st.sampled_from([{}, MIXTURE]),
)
def test_no_prompt_is_lost_or_doubled(
    tmp_path_factory: pytest.TempPathFactory,
    mode: str,
    seed: int,
    kill_share: float,
    algorithm: dict[str, Any],
    mixture: dict[str, Any],
) -> None:
    run = KilledRun(tmp_path_factory.mktemp("run"), recipe_of(mode, algorithm, mixture), seed, kill_share)
    found = run.finish()
    assert found.faults == []
    assert sum(epoch.endings["used"] for epoch in found.epochs) == STEPS * PROMPTS
    for epoch in found.epochs:
        assert max(epoch.draws.values()) == 1
        assert not epoch.is_complete or len(epoch.draws) + epoch.skipped == epoch.size == SIZES[epoch.source]
    if not mixture:
        assert max(epoch.number for epoch in found.epochs) >= STEPS * PROMPTS // SIZES["single_turn"] - 1


def test_a_group_that_a_buffer_loses_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_groups = RLState.use_groups

    def lossy(state: RLState, groups: Any) -> None:
        use_groups(state, groups)
        state.waiting = state.waiting[1:]

    monkeypatch.setattr(RLState, "use_groups", lossy)
    run = KilledRun(tmp_path, recipe_of("continuing stragglers", ALGORITHMS[1], {}), 1, 0.0)
    assert any("have no ending" in fault for fault in run.finish().faults)


def test_a_restart_that_keeps_events_of_after_its_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.rollout.test_accounting.rewind", lambda file, num_events: None)
    run = KilledRun(tmp_path, recipe_of("sampling ahead", {}, {}), 3, 0.25)
    found = run.finish()
    assert run.num_kills > 0 and found.faults


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    num_items=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    shuffle=st.booleans(),
    kills=st.lists(st.integers(0, 30), max_size=5),
)
def test_batches_of_steps_do_not_depend_on_restarts(
    num_items: int, batch_size: int, shuffle: bool, kills: list[int]
) -> None:
    """The loops sft and preference: the step number is the only state."""
    drawn: dict[int, list[int]] = {}
    for last in [*kills, 30]:
        order = DataOrder(num_items, batch_size, seed=5, shuffle=shuffle)
        for step in range(last // EVERY * EVERY, last):
            drawn[step] = order.batch(step)
    order = DataOrder(num_items, batch_size, seed=5, shuffle=shuffle)
    items = [item for step in range(30) for item in drawn.get(step, order.batch(step))]
    for start in range(0, len(items) - num_items + 1, num_items):
        assert sorted(items[start : start + num_items]) == list(range(num_items))
