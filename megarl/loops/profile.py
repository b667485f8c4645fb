"""Profiles of steps (`train.profile_steps`): the spans of driver and ranks, on one time axis, in a Chrome trace."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from megarl.cluster.run_ranks import RunRanks
from megarl.files.atomic import replace_text
from megarl.platform.spans import Span, record, seconds_of_a_span
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.trace import Track, chrome_trace, covered
from megarl.tracking.tracker import Tracker

Call = Callable[[str, bool], Awaitable[list[Any]]]
"""Calls a method of ranks."""

_SAME_CLOCK_SECONDS = 0.1
"""Clocks that seem to differ by less may be one: machines that differ were not started within so short a time."""


class Profiles:
    """Records steps and writes their traces to profiles/ of the run folder.

    Separate engines answer only when they have the weights that are under way to them. No step waits for that: their
    spans are fetched in the background, and the trace is written then.
    """

    def __init__(self, ranks: RunRanks, folder: RunFolder, tracker: Tracker) -> None:
        self._ranks, self._folder, self._tracker = ranks, folder, tracker
        self._writing: asyncio.Task[None] | None = None
        """Writes the trace of the step that was recorded last."""

    @asynccontextmanager
    async def of_step(self, number: int) -> AsyncIterator[None]:
        """Record the step within; one that fails has no trace."""
        offsets_of_engines = asyncio.create_task(self._begin_engines(self._writing))
        try:
            offsets = await _begin(self._ranks.trainers.call)
            record(True)
            began = time.monotonic()
            try:
                yield
                whole = (f"step {number}", began, time.monotonic())
            finally:
                own = record(False)
            of_trainers = await self._ranks.trainers.call("__spans__", False)
        except BaseException:
            offsets_of_engines.cancel()
            raise
        spans = [spans for _, spans in of_trainers]
        facts = {"step": number, "seconds_of_a_span": seconds_of_a_span()}
        self._writing = asyncio.create_task(self._write(whole, own, offsets, spans, offsets_of_engines, facts))
        if not self._ranks.is_separate:
            await self._writing

    async def finish(self) -> None:
        """Wait until the trace of the last recorded step is written."""
        if self._writing is not None:
            await self._writing

    async def close(self) -> None:
        """Drop the trace that is not written yet."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _begin_engines(self, earlier: asyncio.Task[None] | None) -> list[float]:
        """Have separate engines record, once the spans of an earlier step are fetched; `_begin` of their ranks."""
        if not self._ranks.is_separate:
            return []
        if earlier is not None:
            await earlier
        return await _begin(self._ranks.call_engines)

    async def _write(
        self,
        whole: Span,
        own: list[Span],
        offsets: list[float],
        spans: list[list[Span]],
        offsets_of_engines: asyncio.Task[list[float]],
        facts: dict[str, Any],
    ) -> None:
        """Write the trace of a step: `own` spans of the driver, and those of trainers and engines."""
        offsets = offsets + await offsets_of_engines
        if self._ranks.is_separate:
            spans = spans + [found for _, found in await self._ranks.call_engines("__spans__", False)]
        number = facts["step"]
        if len(spans) != len(offsets):
            self._tracker.notice(f"step {number} has no profile: an engine was lost or has joined meanwhile")
            return
        tracks = [Track("driver", own)] + [
            Track(f"rank {rank} on {self._ranks.topology[rank][0]}", found).moved(offset)
            for rank, (found, offset) in enumerate(zip(spans, offsets, strict=True))
        ]
        share, of_ranks_alone = covered(tracks, whole), covered(tracks[1:], whole)
        facts = facts | {
            "covered": share,
            "covered_by_ranks": of_ranks_alone,
            "spans": [len(track.spans) for track in tracks],
        }
        path = self._folder.profiles_folder / f"step_{number:06d}.json"
        path.parent.mkdir(exist_ok=True)
        replace_text(path, json.dumps(chrome_trace(tracks, whole, facts)))
        self._tracker.tell(
            f"profile of step {number}: {path}, {share:.1%} of its time in spans, {of_ranks_alone:.1%} in calls of "
            "ranks; open it in ui.perfetto.dev"
        )


async def _begin(call: Call) -> list[float]:
    """Have ranks record. Returns by how many seconds the driver's clock is ahead of each rank's."""
    # The first answers wait for whatever the ranks are busy with; the second tell the time.
    rounds = [await _ask_clocks(call) for _ in range(2)]
    asked, answered, clocks = min(rounds, key=lambda told: told[1] - told[0])
    found = [(asked + answered) / 2 - clock for clock in clocks]
    return [0.0 if abs(offset) < max(_SAME_CLOCK_SECONDS, answered - asked) else offset for offset in found]


async def _ask_clocks(call: Call) -> tuple[float, float, list[float]]:
    """When the ranks, which now record, were asked for their clocks, when the last answered, and the clocks."""
    asked = time.monotonic()
    clocks = [clock for clock, _ in await call("__spans__", True)]
    return asked, time.monotonic(), clocks
