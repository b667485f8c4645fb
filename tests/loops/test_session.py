"""When a run evaluates, and how its samples are written while the driver goes on hearing others."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.health import HealthConfig
from megarl.loops.reshards import Reshards
from megarl.loops.sample_writer import SampleWriter
from megarl.loops.session import Session, Step
from megarl.rollout.tool_use import ToolUse
from megarl.tracking.health import Health


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
    assert session_with(recipe=recipe).evaluates_first is first


def writer_with(write: Callable[[int, object], None]) -> SampleWriter:
    """A writer of samples that calls `write` with a step and its records."""
    recipe = Recipe.model_validate({"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}})
    tracker: Any = SimpleNamespace(samples=write)
    unused: Any = None
    return SampleWriter(recipe, tracker, unused, unused)


def session_with(**parts: Any) -> Session:
    """A session that has these parts alone."""
    others: dict[str, Any] = {field.name: None for field in fields(Session)}
    return Session(**others | parts)


def test_the_driver_hears_others_while_samples_are_written() -> None:
    heard, written = threading.Event(), []

    def write(step: int, records: object) -> None:
        assert heard.wait(120)
        written.append(step)

    async def play() -> None:
        writer = writer_with(write)
        step = writer.recipe.samples_every_steps
        asyncio.get_running_loop().call_soon(heard.set)
        await writer.write_step(step, [])
        assert written == [step], "the step goes on when its samples are written"

    asyncio.run(play())


def test_a_full_disk_under_samples_ends_the_run() -> None:
    def write(step: int, records: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = writer_with(write)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(writer.write_step(writer.recipe.samples_every_steps, []))


def test_a_run_that_ends_meanwhile_waits_for_its_samples() -> None:
    begun, heard, written = threading.Event(), threading.Event(), []

    def write(step: int, records: object) -> None:
        begun.set()
        assert heard.wait(120)
        written.append(step)

    async def play() -> None:
        writer = writer_with(write)
        task = asyncio.ensure_future(writer.write_step(writer.recipe.samples_every_steps, []))
        assert await asyncio.to_thread(begun.wait, 120)
        task.cancel()
        asyncio.get_running_loop().call_soon(heard.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert written

    asyncio.run(play())


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

    async def run(self, verify: bool, version: int) -> list[dict[str, float]]:
        self.asked.append("reshard")
        return [{"sent_bytes": 0.0}]


def test_engines_are_held_while_they_sleep() -> None:
    engines: Any = Engines()
    recipe = Recipe.model_validate({"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}})
    session = session_with(recipe=recipe, ranks=engines, pool=engines)
    no_replacements: Any = None
    reshards = Reshards(recipe, engines, engines, no_replacements, engines, session.performance)

    async def play() -> None:
        await session.sleep_engines()
        await session.sleep_engines()
        await reshards.run(1)
        await session.sleep_engines()

    asyncio.run(play())
    assert engines.asked == ["hold", "sleep_engine", "reshard", "release", "hold", "sleep_engine"]


def test_a_tool_that_is_never_called_is_said_once() -> None:
    told: dict[str, str] = {}
    tracker = SimpleNamespace(log=lambda step, metrics: None, notice_once=told.setdefault)
    nothing = SimpleNamespace(judge=lambda step, metrics: None)
    folder = SimpleNamespace(path="runs/shop")
    health = Health(HealthConfig())
    session = session_with(tracker=tracker, checkpoints=nothing, folder=folder, tool_use=ToolUse(), health=health)
    session.log(Step(0, {"val/heldout/accuracy": 0.5}))
    assert told == {} and session.tool_use.never_called == []
    session.log(Step(1, {"tools/price/calls": 0.25, "tools/stock/calls": 0.0, "tools/stock/seconds": 0.0}))
    session.log(Step(2, {"tools/price/calls": 0.0, "tools/stock/calls": 0.0}))
    [text] = told.values()
    assert "up to step 1: stock;" in text and text.endswith("megarl samples runs/shop")
    assert session.tool_use.never_called == ["stock"]
    session.log(Step(3, {"tools/price/calls": 0.0, "tools/stock/calls": 1.0}))
    assert session.tool_use.never_called == [] and len(told) == 1
