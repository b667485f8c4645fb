"""Steps of a run: a step is logged before its evaluation, and a signal or a fault ends the run after a save."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.loops.measuring.performance import EvaluationMetrics
from megarl.loops.run_data import RunData
from megarl.loops.started_run import Run, StepWatch
from megarl.loops.stopping import StopRequest
from megarl.rollout.pool import AbandonedError
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import MegarlError, StoppedError, UnhealthyError


class Parts:
    """Ranks, checkpoints, observers and measurements of a run. They record the saves and evaluations asked for."""

    is_separate = False

    def __init__(self, fault_at: int | None = None) -> None:
        self.fault_at, self.events = fault_at, list[str]()
        self.copies = SimpleNamespace(take_metrics=dict)

    async def begin_measuring(self, *arguments: Any) -> None: ...

    begin_step = observe = observe_measured = complete_save = finish = finish_reshard = sleep_engines = begin_measuring

    async def measure_step(self, seconds: object, metrics: object) -> dict[str, float]:
        return {"memory/rollout_gib": 3.0, "perf/mfu": 0.5}

    async def measure_evaluation(self, seconds: object) -> EvaluationMetrics:
        evaluation = {"memory/rollout_gib": 2.0, "memory/logprobs_gib": 1.0, "perf/mfu": 0.1}
        return EvaluationMetrics(evaluation, whole_step_metrics={"time/ranks_idle": 0.25})

    def find_fault(self, step: Any) -> MegarlError | None:
        return UnhealthyError("fault") if step.number == self.fault_at and "reward/mean" in step.metrics else None

    def keep_if_best(self, step: int, metrics: dict[str, float]) -> None:
        self.events.append(f"keep {step} {sorted(metrics)}")

    async def save(self, step: int, save_driver: object = None) -> None:
        self.events.append(f"save {step}")

    def take_metrics(self) -> dict[str, float]:
        return {}

    def find_growth(self) -> None: ...


def run_of(folder: RunFolder, recipe: Recipe, parts: Any) -> Run:
    unused: Any = None
    tracker = Tracker(folder, trackers=())
    data = RunData(tokenizer=unused, sources=(), dropped=unused, draws_file=folder.draws_file, notify=tracker.notice)
    return Run(
        recipe=recipe, folder=folder, origin=unused, tracker=tracker, stop=StopRequest(has_progress=True), data=data,
        processes=parts, ranks=parts, models={}, pool=unused, reshard_schedule=parts, checkpoints=parts,
        samples=unused, watch=StepWatch(performance=parts, profiles=parts, observers=parts),
    )  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "runs_folder": str(tmp_path), "model": {"path": "m"},
            "data": {"train": "t", "validation": {"a": "v"}}, "train": {"steps": 3}, "evaluation": {"every_steps": 2},
        }
    )  # fmt: skip


def written(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]


async def make_step(run: Run, number: int, evaluate: Callable[[int], Any]) -> None:
    async with run.step(number, evaluate) as step:
        with run.tracker.phase("reshard"):
            await asyncio.sleep(0.05)
        step.log({"reward/mean": 0.5})


def test_a_step_is_logged_before_its_evaluation(recipe: Recipe) -> None:
    parts = Parts()
    with RunFolder(recipe) as folder:
        folder.begin()
        run = run_of(folder, recipe, parts)

        async def evaluate(step: int) -> dict[str, float]:
            rows = written(run)
            assert rows[-1]["step"] == step and rows[-1]["evaluation_follows"] and rows[-1]["reward/mean"] == 0.5
            assert run.folder.status["step"] == step
            with run.tracker.phase("evaluation"):
                await asyncio.sleep(0.02)
            with run.tracker.phase("reshard"):
                pass
            return {"val/a/accuracy": 0.25}

        for number in (1, 2):
            asyncio.run(make_step(run, number, evaluate))
        first, second, evaluation = written(run)
        assert "evaluation_follows" not in first and "evaluation_follows" not in evaluation
        assert [row["step"] for row in (first, second, evaluation)] == [1, 2, 2]
        assert set(evaluation) == {
            "step", "val/a/accuracy", "time/step_seconds", "time/evaluation_seconds", "time/reshard_seconds",
            "memory/rollout_gib", "memory/logprobs_gib", "time/ranks_idle",
        }  # fmt: skip
        # The second line has the time of the whole step, and the larger peak.
        assert evaluation["time/step_seconds"] >= second["time/step_seconds"] + 0.02
        assert evaluation["time/reshard_seconds"] > second["time/reshard_seconds"] >= 0.05
        assert evaluation["memory/rollout_gib"] == 3.0
        _, whole = folder.logged_steps()
        assert whole.metrics["perf/mfu"] == 0.5 and whole.metrics["val/a/accuracy"] == 0.25
        assert parts.events[0] == "keep 1 []" and "val/a/accuracy" in parts.events[1]


@pytest.mark.parametrize("fault_at", [None, 2])
def test_a_signal_in_an_evaluation_saves_the_logged_step_and_the_resumed_run_evaluates(
    recipe: Recipe, fault_at: int | None
) -> None:
    parts = Parts(fault_at)

    async def be_interrupted(step: int) -> dict[str, float]:
        run.stop.record_signal("SIGTERM")
        raise AbandonedError

    # Both end the run after a save. The fault is reported, because a signal says nothing about the model.
    ending = StoppedError if fault_at is None else UnhealthyError
    with pytest.raises(ending), RunFolder(recipe) as folder:
        folder.begin()
        run = run_of(folder, recipe, parts)
        asyncio.run(make_step(run, 2, be_interrupted))
    assert parts.events == ["save 2"] and written(run)[-1]["evaluation_follows"]

    async def evaluate(step: int) -> dict[str, float]:
        parts.events.append(f"evaluate {step}")
        return {"val/a/accuracy": 0.75}

    for expected in (["evaluate 2", "keep 2 ['val/a/accuracy']"], []):
        parts.events.clear()
        with RunFolder(recipe, resume=True) as folder:
            folder.begin(2)
            asyncio.run(run_of(folder, recipe, parts).evaluate_at_start(evaluate))
            [step] = folder.logged_steps()
        assert parts.events == expected
        assert step.metrics["val/a/accuracy"] == 0.75 and step.metrics["reward/mean"] == 0.5


def test_a_fault_ends_the_run_after_the_evaluation_and_a_save(recipe: Recipe) -> None:
    parts = Parts(fault_at=2)

    async def evaluate(step: int) -> dict[str, float]:
        parts.events.append(f"evaluate {step}")
        return {}

    with pytest.raises(UnhealthyError), RunFolder(recipe) as folder:
        folder.begin()
        asyncio.run(make_step(run_of(folder, recipe, parts), 2, evaluate))
    assert [event.split()[0] for event in parts.events] == ["evaluate", "keep", "save"]


def test_a_signal_in_sampling_saves_the_step_before(recipe: Recipe) -> None:
    parts = Parts()
    forgotten: list[bool] = []
    state: Any = SimpleNamespace(forget_step=lambda: forgotten.append(True), save=None)

    async def sample(run: Run) -> None:
        async with run.step(2, run.evaluate, state):
            run.stop.record_signal("SIGTERM")
            run.abandon_if_asked()

    with pytest.raises(StoppedError, match="saved after step 1 of 3"), RunFolder(recipe) as folder:
        folder.begin()
        run = run_of(folder, recipe, parts)
        asyncio.run(sample(run))
    assert parts.events == ["save 1"] and forgotten == [True] and written(run) == []
