"""Profiles of the steps in `train.profile_steps`: spans of driver and ranks on one time axis, or profiles by torch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from megarl.cluster.run_ranks import RunRanks
from megarl.files.atomic import replace_text
from megarl.platform.spans import Span, measure_span_seconds, record
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.trace import Track, chrome_trace, covered_share
from megarl.tracking.tracker import Tracker

Call = Callable[[str, bool], Awaitable[list[Any]]]
"""Async function (method, argument) that calls a method of all ranks of a group."""

_SAME_CLOCK_SECONDS = 0.1
"""Clock offsets below this count as 0. Monotonic clocks start at boot. Two machines hardly boot within 0.1 s, so a
small offset means one machine.
"""


class _Clocks(NamedTuple):
    """Monotonic clocks of ranks, read between a request and its last answer at the driver. All in seconds."""

    request_began: float
    answered: float
    readings: list[float]

    @property
    def duration(self) -> float:
        return self.answered - self.request_began


class Profiles:
    """Writes traces of steps to profiles/ in the run folder.

    Separate engines answer only after they have received the weights being sent. No step waits for that: their spans
    are fetched and the trace is written in the background.
    """

    def __init__(
        self, ranks: RunRanks, folder: RunFolder, tracker: Tracker, kinds: Collection[str] = ("spans",)
    ) -> None:
        """Create the recorder. `kinds` are the values of train.profile_with."""
        self._ranks, self._folder, self._tracker = ranks, folder, tracker
        self._has_spans = "spans" in kinds
        self._torch_kinds = [kind for kind in kinds if kind != "spans"]
        self._trace_task: asyncio.Task[None] | None = None
        """Task that writes the newest step's trace."""

    @asynccontextmanager
    async def record_step(self, step_number: int) -> AsyncIterator[None]:
        """Context that profiles one step. A failed step has no profile."""
        async with AsyncExitStack() as stack:
            # Spans last, so that they do not include the start and the files of torch's profiles.
            if self._torch_kinds:
                await stack.enter_async_context(self._profile_by_torch(step_number))
            if self._has_spans:
                await stack.enter_async_context(self._record_spans(step_number))
            yield

    @asynccontextmanager
    async def _profile_by_torch(self, step_number: int) -> AsyncIterator[None]:
        """Context of one step: torch profiles all ranks, and writes files to profiles/step_NNNNNN/."""
        await self._ranks.call("__profile__", self._torch_kinds)
        yield
        folder = self._folder.profiles_folder.absolute() / f"step_{step_number:06d}"
        names = await self._ranks.call_with_first_rank("__profile_end__", folder)
        files = sum(map(len, names))
        self._tracker.info(
            f"profile of step {step_number}: {files} files of {' and '.join(self._torch_kinds)} in {folder}"
        )

    @asynccontextmanager
    async def _record_spans(self, step_number: int) -> AsyncIterator[None]:
        """Context of one step: driver and ranks record spans, and their trace is written."""
        # Not awaited here: the engines may be busy receiving weights, and the step must not wait for them.
        engine_offsets_task = asyncio.create_task(self._begin_engine_spans(self._trace_task))
        try:
            offsets = await _start_spans(self._ranks.trainers.call)
            record(True)
            step_began = time.monotonic()
            try:
                yield
                step_span = (f"step {step_number}", step_began, time.monotonic())
            finally:
                driver_spans = record(False)
            trainer_answers = await self._ranks.trainers.call("__spans__", False)
        # Includes cancellation: a signal may end the step.
        except BaseException:
            engine_offsets_task.cancel()
            raise
        spans = [spans for _, spans in trainer_answers]
        trace_values = {"step": step_number, "seconds_of_a_span": measure_span_seconds()}
        self._trace_task = asyncio.create_task(
            self._write_trace(step_span, driver_spans, offsets, spans, engine_offsets_task, trace_values)
        )
        if not self._ranks.is_separate:
            await self._trace_task

    async def finish(self) -> None:
        if self._trace_task is not None:
            await self._trace_task

    async def close(self) -> None:
        if self._trace_task is not None:
            self._trace_task.cancel()
            # Wait for the end of the task: it uses the ranks, closed next.
            await asyncio.gather(self._trace_task, return_exceptions=True)

    async def _begin_engine_spans(self, previous_trace: asyncio.Task[None] | None) -> list[float]:
        """Start recording spans on separate engines, once `previous_trace` is written. Return clock offsets."""
        if not self._ranks.is_separate:
            return []
        if previous_trace is not None:
            await previous_trace
        return await _start_spans(self._ranks.call_engines)

    async def _write_trace(
        self,
        step_span: Span,
        driver_spans: list[Span],
        offsets: list[float],
        spans: list[list[Span]],
        engine_offsets_task: asyncio.Task[list[float]],
        trace_values: dict[str, Any],
    ) -> None:
        """Write the trace of a step.

        `spans` and `offsets` are those of the trainer ranks, `trace_values` values shown with the trace.
        """
        offsets = offsets + await engine_offsets_task
        if self._ranks.is_separate:
            spans = spans + [rank_spans for _, rank_spans in await self._ranks.call_engines("__spans__", False)]
        step_number = trace_values["step"]
        # Spans and offsets are matched by position, so a changed set of engines would mix up ranks.
        if len(spans) != len(offsets):
            self._tracker.notice(f"step {step_number} has no profile: an engine was lost or has joined during the step")
            return
        # Shift the ranks' spans to the driver's clock, so that all share one time axis.
        tracks = [Track("driver", driver_spans)] + [
            Track(f"rank {rank} on {self._ranks.topology[rank][0]}", rank_spans).shift(offset)
            for rank, (rank_spans, offset) in enumerate(zip(spans, offsets, strict=True))
        ]
        share, rank_share = covered_share(tracks, step_span), covered_share(tracks[1:], step_span)
        trace_values = trace_values | {
            "covered": share,
            "covered_by_ranks": rank_share,
            "spans": [len(track.spans) for track in tracks],
        }
        path = self._folder.profiles_folder / f"step_{step_number:06d}.json"
        path.parent.mkdir(exist_ok=True)
        replace_text(path, json.dumps(chrome_trace(tracks, step_span, trace_values)))
        self._tracker.info(
            f"profile of step {step_number}: {path}, {share:.1%} of its time in spans, {rank_share:.1%} in calls of "
            "ranks; open it in ui.perfetto.dev"
        )


async def _start_spans(call: Call) -> list[float]:
    """Start recording spans on ranks. Return for each rank the seconds by which the driver's clock is ahead."""
    # In the first round ranks may still be busy. The round with the shorter answer time bounds the offset better.
    rounds = [await _ask_clocks(call) for _ in range(2)]
    clocks = min(rounds, key=lambda clocks: clocks.duration)
    # As in NTP: the clock was read about halfway between request and answer.
    offsets = [(clocks.request_began + clocks.answered) / 2 - reading for reading in clocks.readings]
    return [0.0 if abs(offset) < max(_SAME_CLOCK_SECONDS, clocks.duration) else offset for offset in offsets]


async def _ask_clocks(call: Call) -> _Clocks:
    """Start recording spans on ranks. Return the times of request and last answer, and each rank's clock."""
    request_began = time.monotonic()
    readings = [clock for clock, _ in await call("__spans__", True)]
    return _Clocks(request_began, time.monotonic(), readings)
