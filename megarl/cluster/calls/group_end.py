"""The end of a group of ranks: what ends it, the error of its calls, and who survives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from megarl import types
from megarl.cluster.calls.call import Call
from megarl.cluster.calls.group_ranks import GroupRanks
from megarl.cluster.calls.hang_report import HangReport
from megarl.cluster.calls.rank_errors import RankLostError, error_of
from megarl.cluster.ranks.rank_handle import RankError, RankHandle, names_of
from megarl.cluster.ranks.stacks import summary, waits_in_collective

_REPORT_GRACE_SECONDS = 1.5
"""Seconds to wait, after a failure, for another rank to report an earlier failure that caused it. Other ranks may
notice that a rank died before the driver does.
"""
_LEAVE_SECONDS = 10.0
"""Seconds for ranks to exit by themselves when the group closes."""
_KILL_SECONDS = 10.0
"""Maximum seconds to wait for the end of killed processes."""


class GroupEnd:
    """Ends a group of ranks once, at the first event. All calls in progress and all later calls raise its error.

    | event | method | error | `lost` ranks |
    |---|---|---|---|
    | a `MegarlError` of a rank | `explain` | that class; a full disk is a DiskFullError | none |
    | any other error of a rank | `explain` | `RankFailedError` | none |
    | an answer that the driver cannot decode | `explain` | the driver's own error | none |
    | a rank ended, lost its device or peers, or its node | `explain` | `RankLostError` | these |
    | a rank missed a deadline | `explain` | `RankLostError`; a note has all stacks | silent outside a collective |
    | a rank is stopped | `because_stopped`, `if_stopped` | the same | the stopped ones |
    | a rank has a fault that the driver saw | `because_of` | the same | these |
    | a start or a call was cancelled half-way | `interrupt` | PeerLostError | none |
    | the driver needs the group no more | `close` | PeerLostError | none |

    Survivors are the agents of the nodes with the copies of the training state, and the run's other groups. No rank of
    this group survives: a rank that waits in a collective for a lost one cannot leave it in a known state.
    """

    def __init__(self, ranks: GroupRanks, calls: Collection[Call]) -> None:
        """Create the end of these ranks, before it begins. `calls` are always the calls in progress on them."""
        self._ranks, self._calls = ranks, calls
        self.lost: list[RankHandle] = []
        """Ranks whose loss ended the group."""
        self.hang_report: HangReport | None = None
        """Writer of a file with the places of all ranks when one falls silent; None: the error alone shows them."""
        self.resources = AsyncExitStack()
        """Closed after the last rank has ended."""
        self._ending: asyncio.Task[Exception] | None = None

    async def raise_if_begun(self) -> None:
        """Raise the group's error if its end has begun."""
        if self._ending is not None:
            raise await asyncio.shield(self._ending)

    async def close(self) -> None:
        """End the group in peace: its ranks exit by themselves. A busy or slow one is killed."""
        await self._once(self._leave)

    async def interrupt(self, method: str, error: BaseException) -> None:
        """End the group because a call of `method`, or its `start`, was interrupted half-way by this error."""
        text = f"the call of `{method}` on the ranks was interrupted: {error!r}"
        await self._once(partial(self._end_with, types.PeerLostError(text)))

    async def explain(self, call: Call) -> Exception:
        """End the group because a rank failed in this call or missed its deadline. Returns the error to be raised."""
        return await self._once(partial(self._diagnose, call))

    async def because_of(self, ranks: Sequence[int], what: str) -> Exception:
        """End the group because of a fault of these ranks of the group, described by `what`. Returns the error of all
        later calls.
        """

        async def end() -> Exception:
            silent = [self._ranks.handles[rank] for rank in ranks]
            return await self._name_silent(what, silent, await self._ranks.read_stacks())

        return await self._once(end)

    async def because_stopped(self, what: str, stopped: Sequence[RankHandle], stacks: Mapping[int, str]) -> None:
        """End the group because of stopped ranks, described by `what`. `stacks` are those of all ranks."""
        await self._once(partial(self._name_silent, what, stopped, stacks))

    async def if_stopped(self, what: str, patience_seconds: float) -> None:
        """End the group if a living rank is stopped. `what` describes the fault in the error.

        Agents have `patience_seconds` to answer, from a few seconds to a minute.
        """
        if self._ending is not None:
            return
        if stopped := list(await self._ranks.find_obstacles(self._ranks.handles, patience_seconds)):
            await self.because_stopped(what, stopped, await self._ranks.read_stacks())

    async def _once(self, end: Callable[[], Coroutine[None, None, Exception]]) -> Exception:
        """Run `end` (a coroutine ending the group), unless the group is already ending. Returns the error of all later
        calls."""
        if self._ending is None:
            self._ending = asyncio.create_task(end())
        # Several calls may wait for the end. The shield lets it complete even if some of them are cancelled.
        return await asyncio.shield(self._ending)

    async def _leave(self) -> Exception:
        """End the group. If no call is in progress, the ranks may exit by themselves."""
        if not self._calls:
            await self._ranks.dismiss(_LEAVE_SECONDS)
        return await self._end_with(
            types.PeerLostError("the rank processes were already closed when the driver called them")
        )

    async def _diagnose(self, call: Call) -> Exception:
        """End the group because a rank failed or missed its deadline. Returns the error naming the first cause.

        After a failure, other ranks (of other calls too) have a moment to report an earlier failure.
        """
        calls = list(self._calls)
        if not call.errors():
            what = f"did not answer `{call.method}` within {call.limit.seconds:g} s"
            remedy = f"; if it needs longer, raise {call.limit.field}" if call.limit.field else ""
            return await self._name_silent(what, call.silent(), await self._ranks.read_stacks(), remedy)
        answers = [answer for pending in calls for answer in pending.answers.values()]
        await asyncio.wait(answers, timeout=_REPORT_GRACE_SECONDS)
        failures: list[tuple[RankError, Call]] = []
        for pending in calls:
            for error in pending.errors():
                # The driver cannot decode an answer: the driver's own error is the cause.
                if not isinstance(error, RankError):
                    return await self._end_with(error)
                failures.append((error, pending))
        # Consequences come last. So do ranks cut off with their agent: the loss of a node may end an agent of another
        # one before a rank's own end is reported.
        first, failed = min(
            failures, key=lambda failure: (failure[0].echo, failure[0].handle.is_cut_off, failure[0].at)
        )
        # The failure is only a consequence. The cause is a rank that did not enter the collective, if there is one.
        if first.echo and (silent := failed.silent()):
            stacks = await self._ranks.read_stacks()
            if stopped := [handle for handle in silent if not waits_in_collective(stacks[handle.rank])]:
                return await self._name_silent(f"did not enter a collective of `{failed.method}`", stopped, stacks)
        report = first.report
        if report is None or (report["lost"] and not report["megarl_class"]):
            # A rank that reported a fault of its own, such as a broken GPU, cannot continue either.
            lost = [first.handle, *(error.handle for error, _ in failures if not error.echo)]
            self.lost = list(dict.fromkeys(lost))
        await self._kill_ranks()
        # After the end: a lost rank's log is complete then.
        return error_of(first, failed.method, self._ranks.part.num_ranks)

    async def _name_silent(
        self, what: str, silent: Sequence[RankHandle], stacks: Mapping[int, str], remedy: str = ""
    ) -> Exception:
        """End the group because of silent ranks. Returns an error naming them and shows the stacks of all ranks.

        `silent` ranks that only wait for a stopped one in a collective are listed as waiting.
        """
        stopped = [handle for handle in silent if not waits_in_collective(stacks[handle.rank])] or list(silent)
        cause = f"{names_of(stopped)} of {self._ranks.part.num_ranks} {what}"
        # Before the end, which kills the processes.
        obstacles = dict.fromkeys(filter(None, (await self._ranks.find_obstacles(stopped, 0.0)).values()))
        path = await self._write_report(cause, what, stopped, stacks)
        self.lost = stopped
        await self._kill_ranks()
        if waiting := [handle for handle in silent if handle not in stopped]:
            cause += f"; {names_of(waiting)} waited in a collective"
        cause += "".join(f"; {obstacle}" for obstacle in obstacles)
        error = RankLostError(stopped[0].rank, cause + remedy, summary(stacks))
        error.add_note("\n".join(handle.log_tail() for handle in stopped))
        if path is not None:
            error.add_note(f"{path} has the stacks of all threads of all ranks.")
        return error

    async def _write_report(
        self, cause: str, what: str, stopped: Sequence[RankHandle], stacks: Mapping[int, str]
    ) -> Path | None:
        """Write the hang report and return its path; None: there is none. The group must end whatever happens here."""
        if self.hang_report is None:
            return None
        # Before the report: a debugger takes seconds, and an operator may act meanwhile.
        self._ranks.on_slow(f"{cause}; the driver reads the stacks of all ranks, then ends the call")
        try:
            return await self.hang_report.write(self._ranks, what, stopped, stacks)
        except Exception as error:
            self._ranks.on_slow(f"the report of this hang could not be written: {error!r}")
            return None

    async def _end_with(self, error: Exception) -> Exception:
        """End the group with this error of all later calls, and return it."""
        await self._kill_ranks()
        return error

    async def _kill_ranks(self) -> None:
        """Kill all remaining rank processes, and free all resources of the group."""
        for call in self._calls:
            for future in (*call.answers.values(), *call.awaited):
                future.cancel()
        await self._ranks.kill(_KILL_SECONDS)
        await self.resources.aclose()
