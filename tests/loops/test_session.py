"""When a run evaluates, how it writes samples while the driver answers others, and what its steps are checked for."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.loops.observers.step_checks import StepChecks
from megarl.loops.observers.weight_checks import WeightChecks
from megarl.loops.reshard_schedule import ReshardSchedule
from megarl.loops.sample_writer import SampleWriter
from megarl.loops.step import Step
from megarl.reshard.reshard_report import ReshardReport
from megarl.tracking.outcomes import StepOutcome, UpdateOutcome


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({}, True),
        ({"evaluation": {"at_start": False}}, False),
        ({"evaluation": {"at_start": False}, "train": {"steps": 0}}, True),
    ],
)
def test_the_first_evaluation_may_be_left_out(settings: dict[str, Any], first: bool) -> None:
    recipe = Recipe.model_validate(
        {"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}, **settings}
    )
    assert recipe.evaluates_first is first


def writer_with(write: Callable[[int, object], None]) -> SampleWriter:
    """A writer of samples that calls `write` with a step and its records."""
    recipe = Recipe.model_validate({"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}})
    tracker: Any = SimpleNamespace(samples=write)
    unused: Any = None
    return SampleWriter(recipe, tracker, unused, unused)


async def test_the_driver_answers_others_while_samples_are_written() -> None:
    answered, written = threading.Event(), []

    def write(step: int, records: object) -> None:
        assert answered.wait(120)
        written.append(step)

    writer = writer_with(write)
    step = writer.recipe.samples_every_steps
    asyncio.get_running_loop().call_soon(answered.set)
    await writer.write_step(step, [])
    assert written == [step], "the step goes on when its samples are written"


def test_a_full_disk_under_samples_ends_the_run() -> None:
    def write(step: int, records: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = writer_with(write)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(writer.write_step(writer.recipe.samples_every_steps, []))


async def test_a_run_that_ends_meanwhile_waits_for_its_samples() -> None:
    begun, answered, written = threading.Event(), threading.Event(), []

    def write(step: int, records: object) -> None:
        begun.set()
        assert answered.wait(120)
        written.append(step)

    writer = writer_with(write)
    task = asyncio.ensure_future(writer.write_step(writer.recipe.samples_every_steps, []))
    assert await asyncio.to_thread(begun.wait, 120)
    task.cancel()
    asyncio.get_running_loop().call_soon(answered.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert written


class Engines:
    """Engines that share their ranks with the trainer, and the pool before them: what is asked of both, in turn."""

    is_separate, is_paused = False, False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.trainers = self

    async def pause(self) -> None:
        self.is_paused = True
        self.asked.append("hold")

    def resume(self) -> None:
        self.is_paused = False
        self.asked.append("release")

    async def call(self, method: str, **settings: Any) -> list[dict[str, float]]:
        self.asked.append(method)
        return []

    async def run(self, verify: bool, version: int) -> list[ReshardReport]:
        self.asked.append("reshard")
        return [ReshardReport()]


def test_engines_are_held_while_they_sleep() -> None:
    engines: Any = Engines()
    recipe = Recipe.model_validate({"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}})
    unused: Any = None
    checks = WeightChecks(recipe, engines, unused)
    reshard_schedule = ReshardSchedule(recipe, engines, engines, unused, engines, unused, checks)

    async def play() -> None:
        await reshard_schedule.sleep_engines()
        await reshard_schedule.sleep_engines()
        await reshard_schedule.run_reshard(1)
        await reshard_schedule.sleep_engines()

    asyncio.run(play())
    assert engines.asked == ["hold", "sleep_engine", "reshard", "release", "hold", "sleep_engine"]


def checks_with(tracker: Any, **settings: Any) -> StepChecks:
    """The checks of a run without earlier steps."""
    recipe = Recipe.model_validate(
        {"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}, "train": settings}
    )
    earlier = {"path": "runs/shop", "resumed_step": 0, "findings": [], "logged_steps": list}
    return StepChecks(recipe, SimpleNamespace(**earlier), tracker)  # type: ignore[arg-type]


def test_a_tool_that_is_never_called_is_reported_once() -> None:
    notices: dict[str, str] = {}
    ends: list[str] = []
    checks = checks_with(SimpleNamespace(notice_once=notices.setdefault, notice=ends.append))
    checks.find_fault(Step(0, {"val/heldout/accuracy": 0.5}, StepOutcome()))
    checks.end_run()
    assert notices == {} and ends == []
    checks.find_fault(
        Step(1, {"tools/price/calls": 0.25, "tools/stock/calls": 0.0, "tools/stock/seconds": 0.0}, StepOutcome())
    )
    checks.find_fault(Step(2, {"tools/price/calls": 0.0, "tools/stock/calls": 0.0}, StepOutcome()))
    [text] = notices.values()
    assert "up to step 1: stock;" in text and text.endswith("megarl samples runs/shop")
    checks.end_run()
    assert len(ends) == 1 and "in this start of the run: stock;" in ends[0]
    checks.find_fault(Step(3, {"tools/price/calls": 0.0, "tools/stock/calls": 1.0}, StepOutcome()))
    checks.end_run()
    assert len(notices) == len(ends) == 1


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_an_update_without_a_trained_token_is_reported_once(model: str) -> None:
    notices: dict[str, str] = {}
    checks = checks_with(SimpleNamespace(notice_once=notices.setdefault))
    assert checks.find_fault(Step(1, {}, StepOutcome())) is None and not notices
    outcome = StepOutcome()
    outcome.add(model, [UpdateOutcome(True, 1.0, 0.1), UpdateOutcome(False, 0.0, 0.1, is_empty=True)])
    for step in (2, 3):
        assert checks.find_fault(Step(step, {}, outcome)) is None
    [text] = notices.values()
    assert text.startswith("step 2: an update was skipped") and "megarl samples runs/shop" in text


@pytest.mark.parametrize(("action", "is_last"), [("stop", True), ("skip", False)])
def test_a_mismatch_beyond_its_limit_ends_the_run_or_is_reported_once(action: str, is_last: bool) -> None:
    notices: list[str] = []
    tracker = SimpleNamespace(notice_once=lambda kind, text: notices.append(text))
    checks = checks_with(tracker, max_logprob_gap=0.1, on_logprob_gap=action)
    assert checks.find_fault(Step(1, {}, StepOutcome())) is None and notices == []
    fault = checks.find_fault(Step(2, {}, StepOutcome(excess_mismatch=0.3)))
    found = [str(fault)] if is_last else notices
    assert len(found) == 1 and "step 2 were 0.3 nats" in found[0]
    assert (fault is not None) is is_last and len(notices) == (not is_last)


def test_a_limit_removed_by_a_resume_no_longer_counts() -> None:
    """The step of an evaluation that a signal interrupted was saved under the limit."""
    assert checks_with(SimpleNamespace()).find_fault(Step(2, {}, StepOutcome(excess_mismatch=0.3))) is None
