"""Observers of a step are called in one order, and each one is asked for a fault."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.loops.observers.instabilities import Instabilities
from megarl.loops.observers.selection import make_observers
from megarl.loops.observers.step_observer import StepObserver, StepObservers
from megarl.loops.step import Step
from megarl.tracking.outcomes import UpdateOutcome
from megarl.tracking.spikes import SpikeDetector
from megarl.types import MegarlError, UnhealthyError

METHODS = [name for name, _ in inspect.getmembers(StepObserver, inspect.isfunction)]


def noting(name: str, calls: list[str], fault: MegarlError | None = None) -> StepObserver:
    """An observer that notes its calls."""

    class Noting(StepObserver):
        pass

    def overriding(method: str) -> Any:
        def note(self: StepObserver, *arguments: Any) -> Any:
            calls.append(f"{method} {name}")
            return fault if method == "find_fault" else None

        async def note_later(self: StepObserver, *arguments: Any) -> None:
            note(self)

        return note_later if inspect.iscoroutinefunction(getattr(StepObserver, method)) else note

    for method in METHODS:
        setattr(Noting, method, overriding(method))
    return Noting()


@pytest.mark.parametrize("method", METHODS)
def test_each_method_reaches_all_observers_in_their_order(method: str) -> None:
    calls: list[str] = []
    observers = StepObservers([noting("a", calls), noting("b", calls)])
    arguments = [None] * (len(inspect.signature(getattr(StepObserver, method)).parameters) - 1)
    answer = getattr(observers, method)(*arguments)
    if inspect.iscoroutine(answer):
        asyncio.run(answer)
    assert calls == [f"{method} a", f"{method} b"]


def test_the_first_fault_ends_the_run_and_the_others_still_warn() -> None:
    calls: list[str] = []
    first, second = MegarlError("first"), MegarlError("second")
    observers = StepObservers([noting("a", calls), noting("b", calls, first), noting("c", calls, second)])
    assert observers.find_fault(Step(1)) is first and len(calls) == 3


def recipe_with(**train: Any) -> Recipe:
    return Recipe.model_validate(
        {"name": "n", "loop": "sft", "model": {"path": "m"}, "data": {"train": "t"}, "train": train}
    )


def test_the_order_is_checks_instabilities_weights_canary_records(tmp_path: Path) -> None:
    folder: Any = SimpleNamespace(resumed_step=0, path=tmp_path)
    unused: Any = None
    checks, weight_checks = StepObserver(), StepObserver()
    observers = make_observers(
        recipe_with(), ParallelConfig(1, 1, 1, 1), folder, unused, unused, unused, unused,
        checks=checks, weight_checks=weight_checks, spikes=None, predicted_memory={},  # type: ignore[arg-type]
    )  # fmt: skip
    first, second, third, *others = observers._observers
    assert first is checks and isinstance(second, Instabilities) and third is weight_checks
    assert [type(observer).__name__ for observer in others] == ["Canary", "StepRecorder", "PlanPromise"]


async def test_a_spike_has_one_owner_and_is_counted_in_its_step_alone() -> None:
    notices: list[str] = []
    tracker: Any = SimpleNamespace(notice_once=lambda kind, text: notices.append(text))
    spikes = SpikeDetector(factor=10.0, loss_factor=None, window=2)
    unused: Any = None
    instabilities = Instabilities(
        recipe_with(on_spike="stop"), SimpleNamespace(path="runs/n"), tracker, unused, unused, spikes
    )  # type: ignore[arg-type]

    async def run_step(number: int, *norms: float) -> tuple[dict[str, float], MegarlError | None]:
        step = Step(number)
        await instabilities.before_updates(step)
        for norm in norms:
            limit = spikes.limits().grad_norm
            is_spike = limit is not None and norm > limit
            spikes.add(UpdateOutcome(applied=not is_spike, grad_norm=norm, learning_rate=0.1, is_spike=is_spike))
        await instabilities.after_updates(step)
        await instabilities.observe(step)
        return step.metrics, instabilities.find_fault(step)

    assert await run_step(1, 1.0, 1.0) == ({"train/spikes": 0.0, "train/rollbacks": 0.0}, None)
    metrics, fault = await run_step(2, 100.0)
    assert metrics["train/spikes"] == 1.0 and isinstance(fault, UnhealthyError)
    metrics, fault = await run_step(3, 1.0)
    assert metrics["train/spikes"] == 0.0 and fault is None
