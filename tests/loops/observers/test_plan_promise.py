"""Steps are compared with the plan, and the phase that breaks its promise is named once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.loops.observers import plan_promise
from megarl.loops.observers.plan_promise import PlanPromise
from megarl.loops.step import Step
from megarl.planner.seconds.step import StepSeconds

PLANNED = StepSeconds(rollout=6.0, logprobs=1.0, train=2.0, reshard=1.0)
GIB = {"train": 50, "rollout": 40}


class Run:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: StepSeconds | None) -> None:
        monkeypatch.setattr(plan_promise, "recipe_seconds", lambda recipe: seconds)
        self.notices: dict[str, str] = {}
        self.tracker: Any = SimpleNamespace(seconds={}, notice_once=self.notices.setdefault)
        recipe: Any = None
        self.observer = PlanPromise(recipe, self.tracker, {phase: gib * 2**30 for phase, gib in GIB.items()})
        asyncio.run(self.observer.begin_run())

    def step(self, number: int, memory: dict[str, float], seconds: dict[str, float]) -> dict[str, float]:
        self.tracker.seconds = {f"time/{phase}_seconds": value for phase, value in seconds.items()}
        step = Step(number)
        step.log({f"memory/{phase}_gib": gib for phase, gib in memory.items()})
        asyncio.run(self.observer.observe_measured(step))
        return {name: value for name, value in step.metrics.items() if name.startswith("plan/")}


def test_a_kept_promise_is_a_ratio_and_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, PLANNED)
    assert run.step(1, {"train": 45.0, "rollout": 38.0}, {"step": 90.0}) == {"plan/memory_ratio": 0.95}
    second = run.step(2, {"train": 55.0, "rollout": 40.0, "checkpoint": 9.0}, {"step": 15.0, "train": 5.0})
    assert second == {"plan/memory_ratio": 1.1, "plan/seconds_ratio": 1.5}
    assert run.notices == {}


def test_the_phase_that_breaks_the_promise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, PLANNED)
    run.step(1, {}, {"step": 10.0})
    run.step(2, {"train": 50.0, "rollout": 60.0}, {"step": 30.0, "rollout": 9.0, "train": 19.0, "reshard": 1.0})
    assert "rollout took 60.0 GiB" in run.notices["plan memory"] and "1.50 times" in run.notices["plan memory"]
    assert "3.00 times" in run.notices["plan seconds"] and "train: 19.0 s instead of 2.0" in run.notices["plan seconds"]


def test_without_a_cost_model_and_without_peaks_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, None)
    for number in (1, 2):
        assert run.step(number, {}, {"step": 10.0}) == {}
