"""Reshards, as calls to the ranks: the trainers send their weights to the engines.

Separate engines have torch worlds of their own, so they receive weights over a cross-world process group. A lost or
restarted replica makes a new one necessary. `cluster.reshard_states` decides what happens next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from megarl.cluster.calls.deadlines import Limit
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.reshard_states import MOST_ATTEMPTS, Command, Event, ReshardStates, State, TransitionError
from megarl.cluster.run_ranks import RunRanks, gather_answers
from megarl.groups.peer_errors import LostPeer
from megarl.groups.rendezvous import Meeting
from megarl.reshard.reshard_report import ReshardReport
from megarl.types import PeerLostError

_LEAVE_SECONDS = 5.0
"""Seconds for every waiting rank to leave a cancelled cross-world process group."""
_SLACK_SECONDS = 30.0
"""Minimum seconds to find a stopped rank and end its group, of which a debugger takes 10."""
_LOOK_SECONDS = 2.0
"""Seconds between searches for groups that exceed the time limit."""
_BLAME_SECONDS = 60.0
"""Seconds after the time limit until a group ends although its ranks wait in a collective. The group at fault ends
earlier, after at most 58 s: 2 s until the search, 10 s for all stacks, 5 s for its agents, 26 s for the report. Its end
takes 10 s, and the others leave within 5 s.
"""
_MEET_SECONDS = 60.0
"""Seconds for the last ranks to join a new process group after the first. Then they count as missing."""

Reports = list[ReshardReport]
"""Reports of a reshard, one per rank."""
Calls = list[Coroutine[Any, Any, list[Any]]]
"""Calls of one attempt to copy the weights: one to all trainers, then one to each replica."""


class ReshardCalls:
    """Copies the trainers' weights into all engines of a run."""

    def __init__(self, ranks: RunRanks) -> None:
        self._ranks = ranks
        self._states = ReshardStates()
        self._num_groups = 0
        """Cross-world process groups created so far, for their names."""
        self._cancelled = asyncio.Event()
        """Set when the newest cross-world process group is cancelled."""
        self._first_to_leave: WorkerGroup | None = None
        """First replica in this attempt to leave the process group."""
        self._report_error: TransitionError | None = None
        """Error in the callback for a rank's report. The event loop only logs it, so `_await_calls` raises it."""
        ranks.on_removed = self._handle_loss

    @property
    def is_connected(self) -> bool:
        """Whether a cross-world process group is ready, as overlapping reshards need."""
        return self._states.state is State.IDLE

    def add(self, replicas: Sequence[WorkerGroup]) -> None:
        """Include restarted replicas from the next reshard on."""
        if replicas:
            self._ranks.add(replicas)
            self._states.handle(Event.REPLICA_ADDED)

    async def run(self, verify: bool, version: int) -> Reports:
        """Send the trainers' weights, of this version, to all engines. Return the ranks' reports.

        If replicas were lost or restarted, the ranks first create a new cross-world process group. Then they send and
        verify all weights. Raises PeerLostError if no replica is left, or every attempt is cancelled.
        """
        if not self._ranks.is_separate:
            return await self._ranks.trainers.call("reshard", verify, version)
        with self._mark_failure():
            return await self._attempt_until_delivered(self._states.handle(Event.START), verify, version)

    async def run_overlapping(
        self, verify: bool, version: int, engines_paused: Awaitable[object], on_copied: Callable[[], object]
    ) -> Reports:
        """Send copies of the weights to all engines while the trainers execute other calls.

        The engines join when `engines_paused` is done. The trainers send once all engines have joined. `on_copied` is
        called when the copies are made. Returns the engines' reports; `collect_reports` returns the trainers'. If a
        replica is lost meanwhile, the remaining ones get the same copies between two other calls of the trainers.
        """
        if not self.is_connected:
            # A replica was lost after the caller's check of `is_connected`.
            await engines_paused
            reports = await self.run(verify, version)
            on_copied()
            return reports
        self._states.handle(Event.START_OVERLAPPING)
        trainers, limit = self._ranks.trainers, self._limit_seconds("reshard")
        began = time.monotonic()

        async def start_trainers() -> list[Any]:
            await trainers.scatter("start_reshard", [verify] * trainers.world_size, version)
            on_copied()
            return []

        async def start_engine(group: WorkerGroup) -> list[Any]:
            await engines_paused
            return await self._make_call(group, "reshard", [verify] * group.world_size, version, limit=limit)

        calls: Calls = [start_trainers(), *map(start_engine, self._ranks.replicas)]
        with self._mark_failure():
            try:
                answers = await self._await_calls("reshard", limit, self._ranks.groups, calls)
            except PeerLostError:
                # All engines are lost, perhaps because they waited for a failed trainer. Its own error is raised first.
                await trainers.call("finish_reshard")
                raise
            if self._states.end_attempt() is Command.COLLECT_REPORTS:
                await trainers.call("finish_reshard")
                return await self._attempt_until_delivered(self._states.end_attempt(), verify, version)
        trainers.deadlines.record_duration("reshard", time.monotonic() - began)
        return [report for reports in answers for report in reports]

    async def collect_reports(self) -> Reports:
        """Return the trainers' reports of the last overlapping reshard; empty if already fetched."""
        if self._states.handle(Event.COLLECT) is not Command.COLLECT_REPORTS:
            return []
        reports = await self._ranks.trainers.call("finish_reshard")
        # A trainer may have lost an engine after the engine had received all weights.
        for report in reports:
            if isinstance(report, LostPeer):
                self._handle_loss(report.reason)
        return [report for report in reports if isinstance(report, ReshardReport)]

    async def _attempt_until_delivered(self, command: Command, verify: bool, version: int) -> Reports:
        """Repeat attempts, beginning with `command`, until all remaining engines have the weights."""
        while True:
            groups = self._ranks.groups
            method = "join_and_reshard" if command is Command.JOIN else "reshard"
            limit = self._limit_seconds(method)
            # After a loss or a restart the ranks must first create a new process group.
            if command is Command.JOIN:
                calls = self._make_join_calls(groups, version, limit)
            else:
                calls = [
                    self._make_call(group, "reshard", [verify] * group.world_size, version, limit=limit)
                    for group in groups
                ]
            self._first_to_leave = None
            calls[0] = self._end_missing_replicas(groups, calls[0])
            answers = await self._await_calls(method, limit, groups, calls)
            command = self._states.end_attempt(has_suspect=self._has_suspect(groups))
            if self._states.state is State.IDLE:
                return [report for reports in answers for report in reports]
            # The last attempt has failed.
            if command is Command.GIVE_UP:
                reasons = "; ".join(_list_reasons_to_leave(groups, answers)) or "a replica was lost"
                raise PeerLostError(f"{MOST_ATTEMPTS} consecutive reshards to the engines were aborted: {reasons}")
            # End the replica that left first, because it is most likely at fault, and try once more.
            if command is Command.END_SUSPECT:
                suspect = self._first_to_leave
                assert suspect is not None
                fault = f"left the reshard first, at attempt {self._states.attempt} of {MOST_ATTEMPTS}"
                await self._end_group(range(suspect.world_size), suspect, fault)
                command = self._states.end_attempt()

    async def _await_calls(
        self, method: str, limit: float, groups: Sequence[WorkerGroup], calls: Calls
    ) -> list[list[Any]]:
        """Await one attempt's calls and return each group's answers; empty for a lost replica."""
        engine_calls = [
            self._ranks.answers_unless_lost(group, call) for group, call in zip(groups[1:], calls[1:], strict=True)
        ]
        async with self._watch_call(method, limit):
            answers = await gather_answers([calls[0], *engine_calls])
        error, self._report_error = self._report_error, None
        if error is not None:
            raise error
        return answers

    @contextmanager
    def _mark_failure(self) -> Iterator[None]:
        """Context that marks the reshard as failed on an error. Its process group is then never used again."""
        try:
            yield
        except BaseException:
            self._states.handle(Event.FAILED)
            raise

    def _has_suspect(self, groups: Sequence[WorkerGroup]) -> bool:
        """Return whether ending the first replica that left may help.

        It may if all groups of the attempt are alive and the run can continue without it.
        """
        can_lose = self._ranks.on_lost is not None and len(self._ranks.replicas) > 1
        return can_lose and groups == self._ranks.groups and self._first_to_leave is not None

    async def _end_missing_replicas(
        self, groups: Sequence[WorkerGroup], call: Coroutine[Any, Any, list[Any]]
    ) -> list[Any]:
        """Return the answers to the trainers' call. End each replica that did not join their process group."""
        reports = await call
        missing_ranks = {rank for report in reports if isinstance(report, LostPeer) for rank in report.missing}
        first_rank, end_calls = 0, []
        for group in groups:
            absent_ranks = sorted(missing_ranks.intersection(range(first_rank, first_rank + group.world_size)))
            if absent_ranks and group in self._ranks.replicas:
                local_ranks = [rank - first_rank for rank in absent_ranks]
                end_calls.append(self._end_group(local_ranks, group, "did not join the process group of the others"))
            first_rank += group.world_size
        await asyncio.gather(*end_calls)
        return reports

    async def _end_group(self, ranks: Sequence[int], group: WorkerGroup, fault: str) -> None:
        error = await group.diagnosis.end_faulty(ranks, fault)
        self._ranks.remove(group, error if isinstance(error, PeerLostError) else PeerLostError(str(error)))

    @asynccontextmanager
    async def _watch_call(self, method: str, limit: float) -> AsyncIterator[None]:
        """Context that ends the groups at fault for a call that takes too long.

        A running rank leaves a cancelled process group within 5 s. A rank still in it is stopped, so its group ends.
        Without a cancellation, a hanging rank makes the calls of all groups late. Only its own group has ranks outside
        of a collective.
        """

        field = self._ranks.trainers.deadlines.limit_for(method).field
        extended_limit = Limit(limit + self._slack_seconds(limit), field)

        async def end_late() -> None:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                await asyncio.gather(
                    *(group.diagnosis.end_if_overdue(method, extended_limit) for group in self._ranks.groups)
                )

        async def end_stopped() -> None:
            await self._cancelled.wait()
            await asyncio.sleep(_LEAVE_SECONDS)
            fault = f"did not leave `{method}` after its process group was aborted"
            # The agent of a busy node may answer late.
            await self._end_stopped(self._ranks.groups, fault, limit / 2)

        watch_tasks = [asyncio.create_task(end_late()), asyncio.create_task(end_stopped())]
        try:
            yield
        finally:
            for watch in watch_tasks:
                watch.cancel()
            await asyncio.wait(watch_tasks)

    async def _end_stopped(self, groups: Sequence[WorkerGroup], fault: str, patience_seconds: float) -> None:
        """End each group with a stopped rank, if the run can lose engine replicas."""
        if self._ranks.on_lost is not None:
            await asyncio.gather(*(group.diagnosis.end_if_stopped(fault, patience_seconds) for group in groups))

    def _limit_seconds(self, method: str) -> float:
        return self._ranks.trainers.deadlines.limit_for(method).seconds

    def _make_join_calls(self, groups: Sequence[WorkerGroup], version: int, seconds: float) -> Calls:
        """Return the calls with which these groups join a new cross-world process group and get all weights."""
        self._num_groups += 1
        self._cancelled.clear()
        topology = [place for group in groups for place in group.topology]
        rendezvous = self._ranks.trainers.meeting
        assert rendezvous is not None
        meet_seconds = min(_MEET_SECONDS, seconds)
        calls: Calls = []
        first_rank = 0
        for group in groups:
            meeting = Meeting(rendezvous, self._group_name, first_rank, len(topology), meet_seconds)
            calls.append(
                self._make_call(
                    group, "join_and_reshard", [meeting] * group.world_size, topology, version, limit=seconds
                )
            )
            first_rank += group.world_size
        return calls

    def _make_call(
        self, group: WorkerGroup, method: str, per_rank: Sequence[Any], *args: Any, limit: float
    ) -> Coroutine[Any, Any, list[Any]]:
        """Return a call to a group, with extra time to find and end a group at fault."""
        slack = self._slack_seconds(limit) + _BLAME_SECONDS
        return group.scatter(
            method, per_rank, *args, slack_seconds=slack, on_answer=partial(self._handle_report, group)
        )

    def _slack_seconds(self, limit: float) -> float:
        """Return the seconds after a limit until a group with ranks outside of a collective ends."""
        # Ranks waiting for a stopped one need extra time, until it is found and the process group is cancelled.
        return max(limit, _SLACK_SECONDS) if self._ranks.on_lost is not None else limit

    def _handle_report(self, group: WorkerGroup, report: ReshardReport | LostPeer) -> None:
        """Handle a report of a lost peer at once, because other ranks still wait for it."""
        if not isinstance(report, LostPeer):
            return
        if self._first_to_leave is None and group in self._ranks.replicas:
            self._first_to_leave = group
        try:
            if report.missing:
                self._states.handle(Event.PEER_MISSING)
            else:
                self._handle_loss(report.reason)
        except TransitionError as error:
            self._report_error = error

    def _handle_loss(self, reason: str) -> None:
        """Cancel the process group on all ranks, once, if the state machine says so."""
        if self._states.handle(Event.PEER_LOST) is Command.CANCEL_GROUP and not self._cancelled.is_set():
            self._cancelled.set()
            for group in self._ranks.groups:
                group.ranks.cancel_process_group(self._group_name, reason)

    @property
    def _group_name(self) -> str:
        meeting = self._ranks.trainers.meeting
        assert meeting is not None
        # The world's name is new in each attempt, because separate engines may outlive the trainers' group.
        return f"cross_world_{meeting.world}_{self._num_groups}"


def _list_reasons_to_leave(
    groups: Sequence[WorkerGroup], answers: Sequence[Sequence[ReshardReport | LostPeer]]
) -> list[str]:
    """Return, for an error message, why ranks left the process group: each lost a peer."""
    # A lost replica has no answers, so its ranks and answers differ in number.
    return [
        f"rank {rank}: {report.reason}"
        for group, reports in zip(groups, answers, strict=True)
        for rank, report in zip(group.part.ranks(group.world_size), reports, strict=False)
        if isinstance(report, LostPeer)
    ]
