"""Requests to ranks for their stack traces, and the traces written to their logs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from megarl.cluster.hang_report import HangReport
from megarl.cluster.rank_handle import RankHandle, log_since, log_size
from megarl.cluster.stacks import has_begun, is_complete

STACKS_SECONDS = 5.0
"""Seconds for ranks of this machine to write their stacks."""
_LOOK_SECONDS = 0.1
"""Seconds between two looks for stacks in the logs."""


class Ranks(Protocol):
    """A group of ranks; `WorkerGroup` implements it."""

    hang_report: HangReport | None

    @property
    def handles(self) -> Sequence[RankHandle]: ...

    def ask_for_stacks(self, handles: Sequence[RankHandle]) -> Sequence[RankHandle]:
        """Make at least these ranks write their stacks to their logs. Returns those that could be reached."""
        ...


class StackRequests:
    """Asks the ranks of a group for their stack traces. Ranks write these to their logs.

    A rank with an unread request gets no other one. `most_seconds` is the maximum time to wait for the traces. Ranks on
    other nodes write them to a shared file system. It may show them late.
    """

    def __init__(self, group: Ranks) -> None:
        self._group = group
        self.most_seconds = STACKS_SECONDS
        self.unread: dict[RankHandle, tuple[int, float]] = {}
        """Ranks asked for their stacks, without an answer yet. Each has the size of its log before the
        request, in bytes, and the seconds in which debuggers had paused ranks until then.
        """

    async def read(self, seconds: float | None = None) -> dict[int, str]:
        """Return the stack traces of each rank as text, by rank. The text of a suspended or unreachable rank is empty.

        The ranks have `seconds` to write it; None means 5 s. A hang report may pause ranks with a debugger. This method
        then waits until they run again before it asks.
        """
        seconds = STACKS_SECONDS if seconds is None else seconds
        while self._is_debugged:
            await asyncio.sleep(_LOOK_SECONDS)
        # Only text after the end of a log at the request counts, because logs may hold earlier stacks. A late answer to
        # an earlier request shows as well that the rank works.
        self._forget_read()
        debugged = self._seconds_debugging
        sizes = {handle: log_size(handle.log) for handle in self._group.handles}
        asked = self._group.ask_for_stacks([handle for handle in sizes if handle not in self.unread])
        self.unread |= {handle: (sizes[handle], debugged) for handle in asked}
        ends = {handle: self.unread.get(handle, (size, 0.0))[0] for handle, size in sizes.items()}
        stacks: dict[int, str] = {}
        began = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            waited = time.monotonic() - began
            awaited = [handle for handle in ends if not is_complete(stacks.get(handle.rank, ""))]
            stacks |= {handle.rank: log_since(handle.log, ends[handle]) for handle in awaited}
            begun = [handle for handle in awaited if has_begun(stacks[handle.rank])]
            # An incomplete text may never become complete.
            done = [handle for handle in begun if is_complete(stacks[handle.rank]) or waited > STACKS_SECONDS]
            is_over = all(handle in done or handle.died.done() for handle in awaited)
            if self._is_debugged and not is_over:
                return await self.read(seconds)
            if is_over or waited > seconds:
                self._forget_read()
                return stacks

    async def missing(self, patience_seconds: float) -> tuple[list[RankHandle], dict[int, str]]:
        """Ask all ranks for stack traces. Return the living ranks that write none in time, and the traces by rank.

        The time is `patience_seconds`, but at least 5 s and at most `most_seconds`.
        """
        stacks = await self.read(max(STACKS_SECONDS, min(self.most_seconds, patience_seconds)))
        # A rank that could not be asked may work.
        return [one for one in self._group.handles if one in self.unread and not one.died.done()], stacks

    def _forget_read(self) -> None:
        """Forget requests that are answered or may be lost, so that these ranks are asked again."""
        for handle, (end, debugged) in list(self.unread.items()):
            # gdb loses the signal of a request if it is killed at its time limit. Somebody may have emptied the log.
            is_lost = self._seconds_debugging > debugged or log_size(handle.log) < end
            if is_lost or has_begun(log_since(handle.log, end)):
                del self.unread[handle]

    @property
    def _seconds_debugging(self) -> float:
        """Total seconds so far in which debuggers paused ranks for hang reports."""
        report = self._group.hang_report
        return 0.0 if report is None else report.seconds_debugging

    @property
    def _is_debugged(self) -> bool:
        """Whether a debugger pauses ranks for a hang report now."""
        report = self._group.hang_report
        return report is not None and report.is_debugging
