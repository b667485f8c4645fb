"""All ranks of a run: the trainers' group and, if engines are separate, one group per engine replica.

A group fails as a whole and has a `torch.distributed` world of its own. Ranks of different groups exchange weights over
a cross-world process group, called bridge in the code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from megarl.cluster.deadlines import Deadlines
from megarl.cluster.worker_group import RankFailedError, WorkerGroup
from megarl.groups.rendezvous import Meeting
from megarl.types import PeerLostError

_CAUSE_SECONDS = 2.0
"""Seconds to wait, after a failure, for another group to report the root cause."""

_MOST_BRIDGES = 3
"""Attempts of one reshard before the run fails."""
_LEAVE_SECONDS = 5.0
"""Time after an abort within which every waiting rank leaves the process group."""
_SLACK_SECONDS = 20.0
"""Longest time, with short limits, to find a stopped rank and to end its group."""
_MEET_SECONDS = 60.0
"""Time for the last ranks to join a new process group, after the others. A rank absent by then is missing."""

Answer = TypeVar("Answer")


class RunRanks:
    """Ranks of all groups of a run, by their numbers in the run: the trainers' first, then replica by replica."""

    def __init__(self, trainers: WorkerGroup, replicas: Sequence[WorkerGroup] = ()) -> None:
        self.trainers, self.replicas = trainers, list(replicas)
        self.is_separate = bool(replicas)
        """Whether the engines have ranks of their own."""
        self.on_lost: Callable[[WorkerGroup, Exception], object] | None = None
        """Callback (group, error) for a lost replica while others go on. None: losing one ends the run."""
        self._num_bridges = 0
        self._broken = asyncio.Event()
        """Set when the newest process group between groups is aborted."""
        self._bridged: list[WorkerGroup] = []
        """Groups connected by the newest process group; empty if it is not usable."""
        self._has_unfetched_reports = False
        """True while the trainers' reports about the last send are not yet fetched by `finish_send`."""

    @property
    def groups(self) -> list[WorkerGroup]:
        """The trainers' group, then those of the replicas."""
        return [self.trainers, *self.replicas]

    @property
    def world_size(self) -> int:
        """Number of ranks of all groups."""
        return sum(group.world_size for group in self.groups)

    @property
    def topology(self) -> list[tuple[str, ...]]:
        """Each rank's node and the switches above it; see `WorkerGroup`."""
        return [place for group in self.groups for place in group.topology]

    @property
    def hosts(self) -> list[str]:
        """Each rank's address for other nodes; see `WorkerGroup`."""
        return [host for group in self.groups for host in group.hosts]

    def set_deadlines(self, make: Callable[[], Deadlines]) -> None:
        """Give each group deadlines of its own."""
        for group in self.groups:
            group.deadlines = make()

    def on_asked(self, hear: Callable[[str], object]) -> None:
        """Set the callback for a stop signal received by any rank; see `WorkerGroup`."""
        for group in self.groups:
            group.on_asked = hear

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method on all ranks of all groups at once and return the answers. A lost replica has no answers."""
        engines = [self._unless_lost(group, group.call(method, *args, **kwargs)) for group in self.replicas]
        found = await together([self.trainers.call(method, *args, **kwargs), *engines])
        return [answer for answers in found for answer in answers]

    async def call_engines(self, method: str, *args: Any) -> list[Any]:
        """Call the method on all ranks with engines and return the answers."""
        if not self.is_separate:
            return await self.trainers.call(method, *args)
        found = await together([self._unless_lost(group, group.call(method, *args)) for group in self.replicas])
        return [answer for answers in found for answer in answers]

    async def ask(
        self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *args: Any, budget_seconds: float = 0.0
    ) -> list[Any]:
        """Call the method on some ranks, all of one group; see `WorkerGroup.ask`. Raise PeerLostError if it is lost."""
        group = next((group for group in self.groups if ranks[0] in group.part.ranks(group.world_size)), None)
        if group is None:
            raise PeerLostError(f"ranks {list(ranks)}: their group has ended")
        own = [rank - group.part.first_rank for rank in ranks]
        try:
            return await group.ask(own, method, per_rank, *args, budget_seconds=budget_seconds)
        except PeerLostError as error:
            self._lose(group, error)
            raise

    def add(self, groups: Sequence[WorkerGroup]) -> None:
        """Include these replicas from the next reshard on."""
        self.replicas = sorted([*self.replicas, *groups], key=lambda group: group.part.first_rank)

    async def reshard(self, verify: bool, version: int) -> list[dict[str, float]]:
        """Move the trainers' weights of this version into the engines of all groups. Return the ranks' reports.

        If replicas came or went, or one is lost meanwhile, the groups first create a new process group. Creating it
        moves and verifies all weights. Raises PeerLostError if no replica is left, or if every attempt is aborted.
        """
        broken: list[str] = []
        for attempt in range(_MOST_BRIDGES):
            groups = self.groups
            method = "reshard" if groups == self._bridged else "join"
            limit = self.trainers.deadlines.of(method).seconds
            if method == "reshard":
                calls = [self._call(g, "reshard", [verify] * g.world_size, version, limit=limit) for g in groups]
            else:
                calls = self._joining(groups, version, limit)
            # Cleared until the reshard succeeds: after an exception this process group must not be used
            # again.
            self._bridged = []
            left: list[WorkerGroup] = []
            engines = [
                self._unless_lost(group, _noted_if_left(group, call, left))
                for group, call in zip(groups[1:], calls[1:], strict=True)
            ]
            async with self._watched(method, limit):
                found = await together([self._without_missing(groups, calls[0]), *engines])
            told = [
                f"rank {rank}: {report['lost']}"
                for group, reports in zip(groups, found, strict=True)
                for rank, report in zip(group.part.ranks(group.world_size), reports, strict=False)
                if "lost" in report
            ]
            if groups == self.groups and not told:
                self._bridged = groups
                return [report for reports in found for report in reports]
            broken = told or ["a replica was lost"]
            # If attempts fail although all groups are alive, the engine that left first is most likely at fault. It is
            # ended before the last attempt, provided that another engine remains.
            is_last_but_one = attempt == _MOST_BRIDGES - 2
            if is_last_but_one and groups == self.groups and left and len(self.replicas) > 1 and self.on_lost:
                what = f"left the reshard first, at attempt {attempt + 1} of {_MOST_BRIDGES}"
                await self._end(range(left[0].world_size), left[0], what)
        raise PeerLostError(f"{_MOST_BRIDGES} reshards in a row were aborted: {'; '.join(broken)}")

    @property
    def is_bridged(self) -> bool:
        """Whether a reshard can use the existing process group."""
        return self.groups == self._bridged

    async def send(
        self, verify: bool, version: int, at_rest: Awaitable[object], on_copied: Callable[[], object]
    ) -> list[dict[str, float]]:
        """Reshard over the existing process group from copies of the weights, while trainers execute other calls.

        The engines take part once `at_rest` is done. The trainers begin to send when all engines take part. `on_copied`
        is called when the trainers have their copies. Returns the engines' reports once they have the weights;
        `finish_send` returns the trainers'. If a replica is lost meanwhile, `reshard` gives the same copies to the
        others. It runs between two other calls of the trainers.
        """
        if not self.is_bridged:
            # A replica was lost since the caller looked.
            await at_rest
            reports = await self.reshard(verify, version)
            on_copied()
            return reports
        groups = self.groups
        limit, began = self.trainers.deadlines.of("reshard").seconds, time.monotonic()

        async def copied() -> list[Any]:
            await self.trainers.scatter("start_reshard", [verify] * self.trainers.world_size, version)
            on_copied()
            return []

        async def taken(group: WorkerGroup) -> list[Any]:
            await at_rest
            return await self._call(group, "reshard", [verify] * group.world_size, version, limit=limit)

        self._bridged = []
        engines = [self._unless_lost(group, taken(group)) for group in groups[1:]]
        self._has_unfetched_reports = True
        try:
            async with self._watched("reshard", limit):
                found = await together([copied(), *engines])
        except PeerLostError:
            # All engines are lost, perhaps because they waited for a failed trainer. Its own error is raised first.
            await self.finish_send()
            raise
        reports = [report for reports in found for report in reports]
        if groups == self.groups and not any("lost" in report for report in reports):
            self.trainers.deadlines.note("reshard", time.monotonic() - began)
            self._bridged = groups
            return reports
        await self.finish_send()
        return await self.reshard(verify, version)

    async def finish_send(self) -> list[dict[str, float]]:
        """Return the trainers' reports of a `send` that succeeded; empty if they were fetched already."""
        if not self._has_unfetched_reports:
            return []
        self._has_unfetched_reports = False
        reports = await self.trainers.call("finish_reshard")
        # A trainer may have lost an engine after the engine had received all weights.
        if any("lost" in report for report in reports):
            self._bridged = []
        return [report for report in reports if "lost" not in report]

    async def _without_missing(self, groups: Sequence[WorkerGroup], call: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """Return the trainers' answers. End each replica missing from their process group: they go on without it."""
        reports = await call
        missing = {rank for report in reports for rank in report.get("missing", ())}
        first, ending = 0, []
        for group in groups:
            lacking = sorted(missing.intersection(range(first, first + group.world_size)))
            if lacking and group in self.replicas:
                own = [rank - first for rank in lacking]
                ending.append(self._end(own, group, "did not join the process group of the others"))
            first += group.world_size
        await asyncio.gather(*ending)
        return reports

    async def _end(self, ranks: Sequence[int], group: WorkerGroup, what: str) -> None:
        """End a replica because of a fault (`what`) of these of its ranks."""
        error = await group.end_because_of(ranks, what)
        self._lose(group, error if isinstance(error, PeerLostError) else PeerLostError(str(error)))

    @asynccontextmanager
    async def _watched(self, method: str, limit: float) -> AsyncIterator[None]:
        """Find and end a stopped replica within this context; the other ranks only wait for it.

        A working reshard may take its whole `limit`, at first that of a collective. So the search begins each time the
        shortest limit of all methods has passed. It also begins soon after an abort.
        """
        seconds, began = self.trainers.deadlines.shortest.seconds, time.monotonic()
        # Stacks of ranks on other nodes may arrive late, through a shared file system.
        patience = limit / 2

        async def watch() -> None:
            while not await self._is_broken_within(seconds):
                waited = time.monotonic() - began
                await self._end_stopped(self.replicas, f"did not answer `{method}` within {waited:.0f} s", patience)
            await asyncio.sleep(_LEAVE_SECONDS)
            await self._end_stopped(
                self.groups, f"did not leave `{method}` after its process group was aborted", patience
            )

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _is_broken_within(self, seconds: float) -> bool:
        """Wait for an abort of the process group, for `seconds` at most, and return whether it happened."""
        try:
            await asyncio.wait_for(self._broken.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _end_stopped(self, groups: Sequence[WorkerGroup], what: str, patience_seconds: float) -> None:
        """End those groups with a stopped rank, if the run can lose groups (`on_lost`)."""
        if self.on_lost is not None:
            await asyncio.gather(*(group.end_if_stopped(what, patience_seconds) for group in groups))

    def _joining(
        self, groups: Sequence[WorkerGroup], version: int, seconds: float
    ) -> list[Coroutine[Any, Any, list[Any]]]:
        """Return the calls by which the groups create a new process group."""
        self._num_bridges += 1
        self._broken.clear()
        name, topology = self._bridge, [place for group in groups for place in group.topology]
        firsts = [sum(group.world_size for group in groups[:index]) for index in range(len(groups))]
        assert self.trainers.meeting is not None
        within = min(_MEET_SECONDS, seconds)
        meetings = [Meeting(self.trainers.meeting, name, first, len(topology), within) for first in firsts]
        return [
            self._call(group, "join", [meeting] * group.world_size, topology, version, limit=seconds)
            for group, meeting in zip(groups, meetings, strict=True)
        ]

    def _call(
        self, group: WorkerGroup, method: str, per_rank: Sequence[Any], *args: Any, limit: float
    ) -> Coroutine[Any, Any, list[Any]]:
        """Return a group's call in a reshard, with a limit of `limit` seconds."""
        # Ranks waiting for a stopped one need extra time, until it is found and the process group is aborted.
        slack = max(limit, _SLACK_SECONDS) if self.on_lost is not None else limit
        return group.scatter(method, per_rank, *args, slack_seconds=slack, heard=self._break_off_if_left)

    @property
    def _bridge(self) -> str:
        """Name of the newest process group between groups."""
        return f"bridge_{self._num_bridges}"

    def _break_off(self, reason: str) -> None:
        """Abort the process group on all ranks, because one of them is lost."""
        if not self._broken.is_set():
            self._broken.set()
            for group in self.groups:
                group.break_off(self._bridge, reason)

    def _break_off_if_left(self, report: Mapping[str, Any]) -> None:
        """Abort the process group if a rank reports that it left."""
        # When ranks are missing, all others time out and report it themselves.
        if "lost" in report and not report.get("missing"):
            self._break_off(report["lost"])

    async def _unless_lost(self, group: WorkerGroup, call: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """Return a replica's answers; empty if it is lost and others remain."""
        try:
            return await call
        except PeerLostError as error:
            self._lose(group, error)
            return []

    def _lose(self, group: WorkerGroup, error: PeerLostError) -> None:
        """Remove the group of a lost replica. Raise the error if the run cannot go on without it."""
        if group is self.trainers or self.on_lost is None or self.replicas == [group]:
            raise error
        if group in self.replicas:
            self.replicas.remove(group)
            self._break_off(str(error))
            self.on_lost(group, error)

    def show_stacks(self) -> None:
        """Make the ranks of all groups write their stacks; see `WorkerGroup.show_stacks`."""
        for group in self.groups:
            group.show_stacks()

    async def close(self) -> None:
        """Close all groups."""
        self.on_lost = None
        await asyncio.gather(*(group.close() for group in self.groups))


async def _noted_if_left(
    group: WorkerGroup, call: Coroutine[Any, Any, list[Any]], left: list[WorkerGroup]
) -> list[Any]:
    """Return a replica's answers to a reshard. Append the replica to `left` if it left the process group."""
    reports = await call
    if any("lost" in report for report in reports):
        left.append(group)
    return reports


async def together(calls: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Await calls to different groups at the same time and return their answers.

    Raises the first error. If that only reflects another group leaving a collective, raises the other group's error.
    Calls of the other groups stay in progress and end with their groups.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
    failed = [task for task in tasks if task.done() and task.exception() is not None]
    if failed and all(_is_echo(task.exception()) for task in failed):
        await asyncio.wait(tasks, timeout=_CAUSE_SECONDS)
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    if errors:
        for task in tasks:
            # asyncio warns about errors that nobody retrieves; these calls may still fail later.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise min(errors, key=_is_echo)
    return [task.result() for task in tasks]


def _is_echo(error: BaseException | None) -> bool:
    """Return whether an error only reflects another rank's leaving of a collective."""
    return isinstance(error, RankFailedError) and error.is_echo
