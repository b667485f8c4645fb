"""Finds why a call fails or hangs: the rank at fault, and what all ranks are doing."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

from megarl.cluster.calls.call import Call
from megarl.cluster.calls.deadlines import Deadlines, Limit
from megarl.cluster.calls.group_end import GroupEnd
from megarl.cluster.calls.group_ranks import GroupRanks
from megarl.cluster.calls.rank_errors import RankLostError, make_rank_error
from megarl.cluster.ranks.rank_handle import RankError, RankHandle, name_handles
from megarl.cluster.ranks.stacks import STACKS_SECONDS, is_complete, name_ranks, summarise_stacks, waits_in_collective
from megarl.files.atomic import append_whole

_REPORT_GRACE_SECONDS = 1.5
"""Seconds to wait, after a failure, for another rank to report an earlier failure that caused it. Ranks may notice a
dead rank before the driver does.
"""
_MOST_PATIENCE_SECONDS = 60.0
"""Maximum seconds for an agent's answer about stopped ranks."""
_NATIVE_SECONDS = 10.0
"""Seconds for the native stacks of all ranks. A run must end within 30 s of a missed deadline."""
_MOST_NATIVE = 8
"""Maximum ranks with native stacks in a report. A debugger takes seconds for each."""


class Diagnosis:
    """Finds the ranks at fault when a call fails or hangs, and ends their group with an error naming them.

    | event | method | error | `lost` ranks |
    |---|---|---|---|
    | a `MegarlError` of a rank | `explain` | that class; a full disk is a DiskFullError | none |
    | any other error of a rank | `explain` | `RankFailedError` | none |
    | an answer that the driver cannot decode | `explain` | the driver's own error | none |
    | a rank ended, lost its device or peers, or its node | `explain` | `RankLostError` | these |
    | a rank missed a deadline | `explain` | `RankLostError`; a note has all stacks | silent outside a collective |
    | a rank is stopped (SIGSTOP) | `watch`, `end_if_stopped` | the same | the stopped ones |
    | a rank holds up other groups too | `end_if_overdue` | the same | silent outside a collective |
    | a rank has a fault that the driver saw | `end_faulty` | the same | these |
    """

    def __init__(self, ranks: GroupRanks, end: GroupEnd, calls: Collection[Call]) -> None:
        self._ranks, self._end, self._calls = ranks, end, calls
        self.report: HangReport | None = None
        """Writes stacks and states of all ranks to a file when a rank falls silent. None: only the error has them."""
        self.on_slow: Callable[[str], object] = lambda report: None
        """Callback (report) for ranks that fall silent, or delay a call much longer than earlier calls took."""

    async def explain(self, call: Call) -> Exception:
        """End the group because a rank failed or missed its deadline. Return the error to raise."""
        return await self._end.run_once(partial(self._end_call, call))

    async def end_faulty(self, ranks: Sequence[int], fault: str) -> Exception:
        """End the group because of a `fault` of these ranks. Return the error of all later calls."""

        async def end() -> Exception:
            silent = [self._ranks.handles[rank] for rank in ranks]
            return await self._end_silent(fault, silent, await self.read_stacks())

        return await self._end.run_once(end)

    async def end_if_stopped(self, fault: str, patience_seconds: float) -> None:
        """End the group if a living rank is stopped (by SIGSTOP, for example). The error says `fault`.

        An agent without an answer within `patience_seconds` (limited to `STACKS_SECONDS` up to a minute) counts as
        stopped, with all its ranks.
        """
        if self._end.has_begun:
            return
        if stopped_handles := list(await self._find_stopped(self._ranks.handles, patience_seconds)):
            await self._end.run_once(partial(self._end_silent, fault, stopped_handles, await self.read_stacks()))

    async def end_if_overdue(self, method: str, limit: Limit) -> None:
        """End the group if a call of `method` exceeds the limit because of this group's ranks.

        A silent rank outside a collective is at fault. Silent ranks inside a collective may wait for another group's
        ranks, so with only these the group goes on.
        """
        latest_start = time.monotonic() - limit.seconds
        overdue_calls = [call for call in self._calls if call.method == method and call.began < latest_start]
        if self._end.has_begun or not overdue_calls:
            return
        stack_texts = await self.read_stacks()
        silent_handles = [handle for call in overdue_calls for handle in call.silent_handles()]
        if any(not waits_in_collective(stack_texts.get(handle.rank, "")) for handle in silent_handles):
            fault = f"did not answer `{method}` within {limit.seconds:g} s"
            await self._end.run_once(
                partial(self._end_silent, fault, silent_handles, stack_texts, _describe_remedy(limit))
            )

    async def watch(self, call: Call, deadlines: Deadlines, *, budget_seconds: float, extra_seconds: float) -> None:
        """Report the ranks that delay a call, once. End the group if one of them is stopped.

        First calls have long deadlines, so stopped processes are searched for at intervals of the shortest deadline.
        `budget_seconds` is planned working time. `extra_seconds`, which includes it, is all time added to the deadline.
        """
        search_interval, deadline = deadlines.shortest.seconds, call.began + call.limit.seconds
        late_at = call.began + deadlines.seconds_until_late(call.method) + extra_seconds
        search_at = call.began + budget_seconds + search_interval
        # At the deadline, `explain` names the silent ranks.
        while (next_at := min(late_at, search_at)) < deadline:
            if (remaining_seconds := next_at - time.monotonic()) > 0:
                await asyncio.sleep(remaining_seconds)
                continue
            seconds = time.monotonic() - call.began
            try:
                if next_at == late_at:
                    late_at = math.inf
                    await self._report_slow(call, seconds)
                else:
                    # An agent has half of the deadline to answer: that of a busy node answers late.
                    stopped_handles, stack_texts = await self._find_stopped_in_call(
                        call, (call.limit.seconds - extra_seconds) / 2
                    )
                    if stopped_handles:
                        fault = f"did not answer `{call.method}` within {seconds:.0f} s"
                        await self._end.run_once(partial(self._end_silent, fault, stopped_handles, stack_texts))
                    search_at = time.monotonic() + search_interval
            except Exception as error:
                # A log that cannot be read must neither end the run nor later searches. asyncio logs the error.
                search_at = time.monotonic() + search_interval
                message = f"the search for stopped ranks in `{call.method}` failed"
                asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})

    async def read_stacks(self) -> dict[int, str]:
        """Return Python stacks as text by rank; empty for a stopped or unreachable rank."""
        handles = list(self._ranks.handles)
        answers = await self._ranks.request("stacks", handles, 2 * STACKS_SECONDS, seconds=STACKS_SECONDS)
        return {handle.rank: answers.get(handle) or "" for handle in handles}

    def show_stacks(self) -> None:
        """Let all ranks write their stacks to their logs, without waiting for them."""
        reading = asyncio.ensure_future(self.read_stacks())
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _end_call(self, call: Call) -> Exception:
        """End the group because of a failed or late rank. Return the error naming the first cause."""
        calls = list(self._calls)
        # No rank has failed, so the deadline has passed: the stacks show the ranks at fault.
        if not call.errors():
            fault = f"did not answer `{call.method}` within {call.limit.seconds:g} s"
            return await self._end_silent(
                fault, call.silent_handles(), await self.read_stacks(), _describe_remedy(call.limit)
            )
        answers = [answer for unfinished_call in calls for answer in unfinished_call.answers.values()]
        await asyncio.wait(answers, timeout=_REPORT_GRACE_SECONDS)
        rank_failures: list[tuple[RankError, Call]] = []
        for unfinished_call in calls:
            for error in unfinished_call.errors():
                # The driver cannot decode an answer: the driver's own error is the cause.
                if not isinstance(error, RankError):
                    await self._end.kill()
                    return error
                rank_failures.append((error, unfinished_call))
        # Consequences come last. Ranks cut off with their agent count as consequences. A lost node may end another
        # node's agent before a rank's own end is reported.
        first_error, failed_call = min(
            rank_failures, key=lambda failure: (failure[0].echo, failure[0].handle.is_cut_off, failure[0].epoch_seconds)
        )
        # The failure is only a consequence. The cause may be a rank that did not enter the collective.
        if first_error.echo and (silent_handles := failed_call.silent_handles()):
            stack_texts = await self.read_stacks()
            if absent_handles := [h for h in silent_handles if not waits_in_collective(stack_texts[h.rank])]:
                return await self._end_silent(
                    f"did not enter a collective of `{failed_call.method}`", absent_handles, stack_texts
                )
        lost_handles: list[RankHandle] = []
        if first_error.report is None or (first_error.report["lost"] and not first_error.report["megarl_class"]):
            # A rank that reported a fault of its own, such as a broken GPU, cannot continue either.
            lost_handles = [first_error.handle, *(error.handle for error, _ in rank_failures if not error.echo)]
        await self._end.kill(lost_handles)
        # Only now, after the end, is a lost rank's log complete.
        return make_rank_error(first_error, failed_call.method, self._ranks.part.num_ranks)

    async def _end_silent(
        self, fault: str, silent_handles: Sequence[RankHandle], stack_texts: Mapping[int, str], remedy: str = ""
    ) -> Exception:
        """End the group because of silent ranks. Return an error with their names and all stacks.

        Silent ranks that only wait for a stopped rank in a collective are listed as waiting.
        """
        faulty_handles = [h for h in silent_handles if not waits_in_collective(stack_texts[h.rank])] or list(
            silent_handles
        )
        cause = f"{name_handles(faulty_handles)} of {self._ranks.part.num_ranks} {fault}"
        # Before the end, which kills the processes.
        obstacles = dict.fromkeys(filter(None, (await self._find_stopped(faulty_handles, 0.0)).values()))
        report_path = await self._write_report(cause, fault, faulty_handles, stack_texts)
        await self._end.kill(faulty_handles)
        if waiting_handles := [handle for handle in silent_handles if handle not in faulty_handles]:
            cause += f"; {name_handles(waiting_handles)} waited in a collective"
        cause += "".join(f"; {obstacle}" for obstacle in obstacles)
        error = RankLostError(faulty_handles[0].rank, cause + remedy, summarise_stacks(stack_texts))
        error.add_note("\n".join(handle.log_tail() for handle in faulty_handles))
        if report_path is not None:
            error.add_note(f"{report_path} has the stacks of all threads of all ranks.")
        return error

    async def _write_report(
        self, cause: str, fault: str, stopped: Sequence[RankHandle], stack_texts: Mapping[int, str]
    ) -> Path | None:
        """Write the hang report and return its path, or None. Raises nothing, because the group must end."""
        if self.report is None:
            return None
        # Before the report: a debugger takes seconds, and an operator may act meanwhile.
        self.on_slow(f"{cause}; the driver reads the stacks of all ranks, then ends the call")
        try:
            return await self.report.write(self, fault, stopped, stack_texts)
        except Exception as error:
            self.on_slow(f"the report of this hang could not be written: {error!r}")
            return None

    async def _report_slow(self, call: Call, seconds: float) -> None:
        """Report the ranks that still work after `seconds`, while the other ranks of the call wait for them."""
        stack_texts = await self.read_stacks()
        silent_handles = call.silent_handles()
        slow_handles = [
            h
            for h in silent_handles
            if is_complete(stack_texts[h.rank]) and not waits_in_collective(stack_texts[h.rank])
        ]
        # If all ranks work, none is slower than its peers: this call has more to do than earlier calls.
        if slow_handles and len(slow_handles) < len(call.answers) and not call.errors():
            self.on_slow(
                f"{name_handles(slow_handles)} of {self._ranks.part.num_ranks} "
                f"{'is' if len(slow_handles) == 1 else 'are'} slow in `{call.method}`: other ranks wait after "
                f"{seconds:.0f} s, the deadline is {call.limit.seconds:.0f} s\n"
                + summarise_stacks({handle.rank: stack_texts[handle.rank] for handle in slow_handles})
            )

    async def _find_stopped(self, handles: Sequence[RankHandle], patience_seconds: float) -> dict[RankHandle, str]:
        """Return the living ranks that cannot run, each with the obstacle in words.

        The text is empty if the rank's own process is stopped. Other obstacles are a stopped fork server, and an agent
        without an answer within `patience_seconds` (limited to `STACKS_SECONDS` up to a minute).
        """
        limited_seconds = max(STACKS_SECONDS, min(_MOST_PATIENCE_SECONDS, patience_seconds))
        answers = await self._ranks.request("stopped", handles, limited_seconds)
        silent_agent = "the agent of its node does not answer"
        obstacles = {handle: silent_agent if text is None else text for handle, text in answers.items()}
        return {handle: text for handle, text in obstacles.items() if not handle.died.done()}

    async def _find_stopped_in_call(
        self, call: Call, patience_seconds: float
    ) -> tuple[list[RankHandle], Mapping[int, str]]:
        """Return a call's stopped ranks, and the stacks of all ranks by rank. No stopped rank: no stacks."""
        stopped_handles = await self._find_stopped(call.silent_handles(), patience_seconds)
        if not stopped_handles:
            return [], {}
        stack_texts = await self.read_stacks()
        # One may have continued or ended meanwhile.
        still_stopped = await self._find_stopped(
            [h for h in call.silent_handles() if h in stopped_handles], patience_seconds
        )
        return list(still_stopped), stack_texts

    async def describe_ranks(self, stack_texts: Mapping[int, str]) -> dict[int, list[str]]:
        """Return lines with each rank's kernel states and Python `stack_texts`."""
        handles = list(self._ranks.handles)
        states = await self._ranks.request("thread_states", handles, STACKS_SECONDS)
        return {
            handle.rank: [
                f"\n== rank {handle.rank}: threads in the kernel ==",
                states.get(handle) or "unknown",
                f"\n== rank {handle.rank}: Python ==",
                stack_texts.get(handle.rank, "").strip() or "wrote no stack",
            ]
            for handle in handles
        }

    async def read_native_stacks(self, preferred: Sequence[RankHandle], max_ranks: int) -> dict[int, str]:
        """Return native stacks, or why there are none, of at most `max_ranks` ranks, `preferred` ones first."""
        handles = sorted(self._ranks.handles, key=lambda handle: handle not in preferred)[:max_ranks]
        answers = await self._ranks.request("native_stacks", handles, _NATIVE_SECONDS + 1.0, seconds=_NATIVE_SECONDS)
        texts = {handle.rank: answers.get(handle, "no native stacks: the process has ended") for handle in handles}
        silent_agent = "no native stacks: the agent of its node does not answer"
        return {rank: silent_agent if text is None else text for rank, text in texts.items()}


def _describe_remedy(limit: Limit) -> str:
    return f"; if it needs longer, raise {limit.field}" if limit.field else ""


class HangReport:
    """Writes `hang_1.txt`, `hang_2.txt` and so on into the log folder of a start.

    A file has Python stacks and kernel states of every rank of the run. Of the ending group it also has native stacks
    (py-spy or gdb): of up to `most_native` ranks, silent ones first. `groups()` returns the diagnoses of all groups.
    """

    def __init__(
        self, folder: Path, groups: Callable[[], Sequence[Diagnosis]], *, most_native: int = _MOST_NATIVE
    ) -> None:
        self._folder, self._groups, self._most_native = folder, groups, most_native

    async def write(
        self, group: Diagnosis, fault: str, silent_handles: Sequence[RankHandle], stack_texts: Mapping[int, str]
    ) -> Path | None:
        """Write a report about a group's silent ranks, and return its path; None if it cannot be written.

        `stack_texts` are the group's Python stacks by rank.
        """

        async def describe_group(diagnosis: Diagnosis) -> dict[int, list[str]]:
            return await diagnosis.describe_ranks(stack_texts if diagnosis is group else await diagnosis.read_stacks())

        other_groups = [diagnosis for diagnosis in self._groups() if diagnosis is not group]
        texts = await asyncio.gather(*map(describe_group, (group, *other_groups)), return_exceptions=True)
        # A group that fails is left out.
        lines_by_rank = {rank: lines for text in texts if isinstance(text, dict) for rank, lines in text.items()}
        silent_ranks = sorted(handle.rank for handle in silent_handles)
        lines = [
            f"{datetime.now().astimezone().isoformat(timespec='seconds')}: {name_ranks(silent_ranks)} {fault}",
            f"first silent rank: {silent_ranks[0]}",
            *(line for rank in sorted(lines_by_rank) for line in lines_by_rank[rank]),
        ]
        path = self._unused_path()
        # The machine may have lost its disk. Even then the error must name the silent rank.
        with suppress(OSError):
            append_whole(path, ("\n".join(lines) + "\n").encode(errors="replace"))
            # Only of the ending group, because a debugger pauses a rank.
            for rank, text in (await group.read_native_stacks(silent_handles, self._most_native)).items():
                append_whole(path, f"\n== rank {rank}: native ==\n{text}\n".encode(errors="replace"))
            return path
        return None

    def _unused_path(self) -> Path:
        report_number = 1
        while (path := self._folder / f"hang_{report_number}.txt").exists():
            report_number += 1
        return path
