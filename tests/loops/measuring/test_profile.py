"""A profiled step whose engines still receive weights: it begins and ends without them, and has their spans."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.loops.measuring.profiles import Profiles
from megarl.types import MegarlError


class Ranks:
    """A trainer that answers at once, and an engine that does when it has the weights."""

    def __init__(self) -> None:
        self.is_separate, self.topology = True, [("a",), ("b",)]
        self.trainers = SimpleNamespace(call=self._call)
        self.has_weights = asyncio.Event()
        self.asked: list[bool] = []

    async def _call(self, method: str, is_on: bool) -> list[Any]:
        assert method == "__spans__"
        now = time.monotonic()
        return [(now, [] if is_on else [("advance", now - 0.001, now)])]

    async def call_engines(self, method: str, is_on: bool) -> list[Any]:
        self.asked.append(is_on)
        await self.has_weights.wait()
        return await self._call(method, is_on)


def profiles_of(ranks: Ranks, folder: Path) -> Profiles:
    tracker = SimpleNamespace(info=lambda text: None)
    return Profiles(ranks, SimpleNamespace(profiles_folder=folder / "profiles"), tracker)  # type: ignore[arg-type]


async def test_steps_do_not_wait_for_weights_that_are_under_way(tmp_path: Path) -> None:
    async def play() -> None:
        ranks = Ranks()
        profiles = profiles_of(ranks, tmp_path)
        for number in (1, 2):
            async with asyncio.timeout(120), profiles.record_step(number):
                await asyncio.sleep(0)
        assert not (tmp_path / "profiles").exists() and ranks.asked == [True]
        ranks.has_weights.set()
        await profiles.finish()
        # Two clocks and the spans of the first step, before the second is recorded.
        assert ranks.asked == [True, True, False] * 2

    await play()
    for number in (1, 2):
        trace = json.loads((tmp_path / f"profiles/step_{number:06d}.json").read_text())
        assert trace["otherData"]["step"] == number and trace["otherData"]["spans"] == [0, 1, 1]


async def test_a_step_that_fails_has_no_trace(tmp_path: Path) -> None:
    ranks = Ranks()
    profiles = profiles_of(ranks, tmp_path)
    with pytest.raises(MegarlError, match="broken"):
        async with profiles.record_step(1):
            raise MegarlError("broken")
    ranks.has_weights.set()
    await profiles.finish()
    await profiles.close()
    assert not (tmp_path / "profiles").exists()
