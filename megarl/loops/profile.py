"""Profiles of steps (`train.profile_steps`): times of driver and ranks on one time axis, as a Chrome trace."""

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
"""Async function that calls a method on all ranks of a group, with a flag as its argument."""

_SAME_CLOCK_SECONDS = 0.1
"""Clock differences below this number of seconds count as 0.

Different machines do not boot within such a short time of each other, so a small difference means one machine.
"""


class Profiles:
    """Records steps and writes their traces to profiles/ in the run folder.

    Separate engines answer only after they have received the weights in transfer. No step waits for that: their times
    are fetched and the trace is written in the background.
    """

    def __init__(self, ranks: RunRanks, folder: RunFolder, tracker: Tracker) -> None:
        self._ranks, self._folder, self._tracker = ranks, folder, tracker
        self._writing: asyncio.Task[None] | None = None
        """Task that writes the trace of the newest recorded step."""

    @asynccontextmanager
    async def of_step(self, number: int) -> AsyncIterator[None]:
        """Context that records a step. A failed step has no trace."""
        # Not awaited here: the engines may be busy receiving weights, and the step must not wait for them.
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
        # Includes cancellation: a signal may end the step.
        except BaseException:
            offsets_of_engines.cancel()
            raise
        spans = [spans for _, spans in of_trainers]
        facts = {"step": number, "seconds_of_a_span": seconds_of_a_span()}
        self._writing = asyncio.create_task(self._write(whole, own, offsets, spans, offsets_of_engines, facts))
        if not self._ranks.is_separate:
            await self._writing

    async def finish(self) -> None:
        """Wait until the trace of the newest recorded step is written."""
        if self._writing is not None:
            await self._writing

    async def close(self) -> None:
        """Cancel writing the trace, if it is not written yet."""
        if self._writing is not None:
            self._writing.cancel()
            # Wait for the end of the task: it uses the ranks, closed next.
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _begin_engines(self, earlier: asyncio.Task[None] | None) -> list[float]:
        """Start recording on separate engines once the `earlier` trace is written.

        Returns the seconds by which the driver's clock is ahead of each rank's.
        """
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
        """Write the trace of a step.

        `own` are time spans of the driver. `spans` and `offsets` (clock differences) belong to the trainer ranks,
        `offsets_of_engines` to the engine ranks. `facts` are values shown with the trace.
        """
        offsets = offsets + await offsets_of_engines
        if self._ranks.is_separate:
            spans = spans + [found for _, found in await self._ranks.call_engines("__spans__", False)]
        number = facts["step"]
        # Spans and offsets are matched by position, so a changed set of engines would mix up ranks.
        if len(spans) != len(offsets):
            self._tracker.notice(f"step {number} has no profile: an engine was lost or has joined during the step")
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
    """Start recording on ranks. Returns the seconds by which the driver's clock is ahead of each rank's."""
    # In the first round ranks may still be busy. The round with the shorter answer time bounds the offset better.
    rounds = [await _ask_clocks(call) for _ in range(2)]
    asked, answered, clocks = min(rounds, key=lambda told: told[1] - told[0])
    # As in NTP: the clock was read about halfway between request and answer.
    found = [(asked + answered) / 2 - clock for clock in clocks]
    return [0.0 if abs(offset) < max(_SAME_CLOCK_SECONDS, answered - asked) else offset for offset in found]


async def _ask_clocks(call: Call) -> tuple[float, float, list[float]]:
    """Start recording on ranks. Returns the time of the request, the time of the last answer, and each rank's clock."""
    asked = time.monotonic()
    clocks = [clock for clock, _ in await call("__spans__", True)]
    return asked, time.monotonic(), clocks
