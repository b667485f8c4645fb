"""All ranks of a run: the trainers' group and, where engines are separate, a group of its own for each replica.

A group is a domain of failure and has one world of `torch.distributed`; ranks of different groups meet on a bridge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from megarl.cluster.deadlines import Deadlines
from megarl.cluster.worker_group import RankFailedError, WorkerGroup
from megarl.platform.rendezvous import Meeting
from megarl.types import PeerLostError

_CAUSE_SECONDS = 2.0
"""After a failure the other groups have so long to tell of an earlier one."""

_MOST_BRIDGES = 3
_LEAVE_SECONDS = 5.0
"""A rank that waits on a bridge has left it so long after it was broken off."""
_SLACK_SECONDS = 20.0
"""To find a rank that is stopped, and to end its group, takes at most so long where limits are short."""
_MEET_SECONDS = 60.0
"""A rank that has not come to a bridge so long after the others is missing."""

Answer = TypeVar("Answer")


class RunRanks:
    """The ranks of all groups of a run, by their numbers in the run: the trainers' first, then replica by replica."""

    def __init__(self, trainers: WorkerGroup, replicas: Sequence[WorkerGroup] = ()) -> None:
        self.trainers, self.replicas = trainers, list(replicas)
        self.is_separate = bool(replicas)
        """Whether the engines have ranks of their own."""
        self.on_lost: Callable[[WorkerGroup, Exception], object] | None = None
        """Hears of a replica's group that ended while others go on; without it the end of one is the run's."""
        self._num_bridges = 0
        self._broken = asyncio.Event()
        """Set where the bridge that was made last is broken off."""
        self._bridged: list[WorkerGroup] = []
        self._has_unfetched_reports = False

    @property
    def groups(self) -> list[WorkerGroup]:
        """The trainers' group, then those of the replicas."""
        return [self.trainers, *self.replicas]

    @property
    def world_size(self) -> int:
        """The ranks of all groups."""
        return sum(group.world_size for group in self.groups)

    @property
    def topology(self) -> list[tuple[str, ...]]:
        """As of a group."""
        return [place for group in self.groups for place in group.topology]

    @property
    def hosts(self) -> list[str]:
        """As of a group."""
        return [host for group in self.groups for host in group.hosts]

    def set_deadlines(self, make: Callable[[], Deadlines]) -> None:
        """Give each group deadlines of its own."""
        for group in self.groups:
            group.deadlines = make()

    def on_asked(self, hear: Callable[[str], object]) -> None:
        """Have a signal to stop heard that reached any rank; see `WorkerGroup`."""
        for group in self.groups:
            group.on_asked = hear

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As of a group: call the method on all ranks of all groups at once. A replica that is lost has no answers."""
        engines = [self._unless_lost(group, group.call(method, *args, **kwargs)) for group in self.replicas]
        found = await together([self.trainers.call(method, *args, **kwargs), *engines])
        return [answer for answers in found for answer in answers]

    async def call_engines(self, method: str, *args: Any) -> list[Any]:
        """Call the method on all ranks that have engines."""
        if not self.is_separate:
            return await self.trainers.call(method, *args)
        found = await together([self._unless_lost(group, group.call(method, *args)) for group in self.replicas])
        return [answer for answers in found for answer in answers]

    async def ask(
        self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *args: Any, budget_seconds: float = 0.0
    ) -> list[Any]:
        """As of a group: call the method on some ranks, all of one group. Raises PeerLostError if it is lost."""
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
        """Let these replicas take part from the next reshard on."""
        self.replicas = sorted([*self.replicas, *groups], key=lambda group: group.part.first_rank)

    async def reshard(self, verify: bool, version: int) -> list[dict[str, float]]:
        """Move the trainers' weights, of this version, into the engines of all groups; the ranks' reports.

        Where replicas came or went, or one is lost meanwhile, the groups are bridged anew first, which moves and
        verifies all weights. Raises PeerLostError where no replica is left or bridges do not hold.
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
            # What ended every bridge, with all groups alive, is most likely with the engine that left first.
            is_last_but_one = attempt == _MOST_BRIDGES - 2
            if is_last_but_one and groups == self.groups and left and len(self.replicas) > 1 and self.on_lost:
                what = f"left the reshard first, at attempt {attempt + 1} of {_MOST_BRIDGES}"
                await self._end(range(left[0].world_size), left[0], what)
        raise PeerLostError(f"{_MOST_BRIDGES} reshards in a row were broken off: {'; '.join(broken)}")

    @property
    def is_bridged(self) -> bool:
        """Whether a reshard needs no new bridge."""
        return self.groups == self._bridged

    async def send(
        self, verify: bool, version: int, at_rest: Awaitable[object], on_copied: Callable[[], object]
    ) -> list[dict[str, float]]:
        """As `reshard` over the bridge that is there, but from copies of the weights, beside other calls of trainers.

        The engines take part once `at_rest` is done, and the trainers begin to send when all engines do. `on_copied` is
        called when the trainers have their copies. Returns the engines' reports once they have the weights;
        `finish_send` has those of the trainers. Where a replica is lost meanwhile the others get the same copies by
        `reshard`, between two other calls of the trainers.
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
            # Engines that are lost to the last may have waited for a trainer, which knows why.
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
        """The trainers' reports of a `send` that ended well, if nobody has asked for them yet."""
        if not self._has_unfetched_reports:
            return []
        self._has_unfetched_reports = False
        reports = await self.trainers.call("finish_reshard")
        # A trainer may have met the end of an engine that had taken all.
        if any("lost" in report for report in reports):
            self._bridged = []
        return [report for report in reports if "lost" not in report]

    async def _without_missing(self, groups: Sequence[WorkerGroup], call: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """The trainers' answers; a replica that did not come to their bridge is ended, for they go on without it."""
        reports = await call
        missing = {rank for report in reports for rank in report.get("missing", ())}
        first, ending = 0, []
        for group in groups:
            lacking = sorted(missing.intersection(range(first, first + group.world_size)))
            if lacking and group in self.replicas:
                own = [rank - first for rank in lacking]
                ending.append(self._end(own, group, "did not come to the bridge of the others"))
            first += group.world_size
        await asyncio.gather(*ending)
        return reports

    async def _end(self, ranks: Sequence[int], group: WorkerGroup, what: str) -> None:
        """End a replica because of what these of its ranks did."""
        error = await group.end_because_of(ranks, what)
        self._lose(group, error if isinstance(error, PeerLostError) else PeerLostError(str(error)))

    @asynccontextmanager
    async def _watched(self, method: str, limit: float) -> AsyncIterator[None]:
        """Within, a replica that is stopped is found and ended; the others only wait for it.

        A reshard that works may take its whole `limit`, at first that of a collective. So whether replicas are stopped
        is looked at each time the shortest limit of all verbs has passed, and soon after the bridge is broken off.
        """
        seconds, began = self.trainers.deadlines.shortest.seconds, time.monotonic()
        # Stacks of ranks on other nodes may come late, through a shared file system.
        patience = limit / 2

        async def watch() -> None:
            while not await self._is_broken_within(seconds):
                waited = time.monotonic() - began
                await self._end_stopped(self.replicas, f"did not answer `{method}` within {waited:.0f} s", patience)
            await asyncio.sleep(_LEAVE_SECONDS)
            await self._end_stopped(self.groups, f"did not leave `{method}` over a broken bridge", patience)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _is_broken_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._broken.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _end_stopped(self, groups: Sequence[WorkerGroup], what: str, patience_seconds: float) -> None:
        if self.on_lost is not None:
            await asyncio.gather(*(group.end_if_stopped(what, patience_seconds) for group in groups))

    def _joining(
        self, groups: Sequence[WorkerGroup], version: int, seconds: float
    ) -> list[Coroutine[Any, Any, list[Any]]]:
        """The calls by which the groups meet on a new bridge."""
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
        """A group's part in a reshard, which may take `limit` seconds."""
        # Ranks that wait for a stopped one are given the time to learn that it is gone.
        slack = max(limit, _SLACK_SECONDS) if self.on_lost is not None else limit
        return group.scatter(method, per_rank, *args, slack_seconds=slack, heard=self._break_off_if_left)

    @property
    def _bridge(self) -> str:
        """The name of the bridge that was made last."""
        return f"bridge_{self._num_bridges}"

    def _break_off(self, reason: str) -> None:
        """Have all ranks leave the bridge, for one of them is lost."""
        if not self._broken.is_set():
            self._broken.set()
            for group in self.groups:
                group.break_off(self._bridge, reason)

    def _break_off_if_left(self, report: Mapping[str, Any]) -> None:
        # Those that wait for who is missing tell of it themselves.
        if "lost" in report and not report.get("missing"):
            self._break_off(report["lost"])

    async def _unless_lost(self, group: WorkerGroup, call: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """A replica's answers; none where its loss leaves others."""
        try:
            return await call
        except PeerLostError as error:
            self._lose(group, error)
            return []

    def _lose(self, group: WorkerGroup, error: PeerLostError) -> None:
        """Cut a replica's group off. Raises the error where the run cannot do without it."""
        if group is self.trainers or self.on_lost is None or self.replicas == [group]:
            raise error
        if group in self.replicas:
            self.replicas.remove(group)
            self._break_off(str(error))
            self.on_lost(group, error)

    def show_stacks(self) -> None:
        """As of a group."""
        for group in self.groups:
            group.show_stacks()

    async def close(self) -> None:
        """Close all groups."""
        self.on_lost = None
        await asyncio.gather(*(group.close() for group in self.groups))


async def _noted_if_left(
    group: WorkerGroup, call: Coroutine[Any, Any, list[Any]], left: list[WorkerGroup]
) -> list[Any]:
    """A replica's answers to a reshard; `left` are those that gave it up, in this order."""
    reports = await call
    if any("lost" in report for report in reports):
        left.append(group)
    return reports


async def together(calls: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """The answers of calls to different groups at the same time.

    Raises the error that was first: where one group's is only the consequence of another's that left a collective, that
    one's. Calls of the others are left under way, to end with their groups.
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
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise min(errors, key=_is_echo)
    return [task.result() for task in tasks]


def _is_echo(error: BaseException | None) -> bool:
    return isinstance(error, RankFailedError) and error.is_echo
