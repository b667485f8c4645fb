"""All ranks of a run: the trainers' group and, if engines are separate, one group per replica.

Each group has a `torch.distributed` world of its own, and ends as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from megarl import faults
from megarl.cluster.agents.agent_link import AgentLink
from megarl.cluster.calls.deadlines import Deadlines
from megarl.cluster.calls.diagnosis import HangReport
from megarl.cluster.calls.rank_errors import RankFailedError
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.types import PeerLostError

_WATCH_SECONDS = 1.0
"""Seconds between searches for lost ranks while no call runs."""
_NO_CALL = "sampling and scoring"
"""Text in place of a method's name in the error of a rank lost without a call."""
_CAUSE_SECONDS = 2.0
"""Seconds to wait, after a failure, for another group to report the root cause."""

Answer = TypeVar("Answer")


class RanksNodes(Protocol):
    """Nodes of a run (`launchers.run_nodes.RunNodes`)."""

    async def reserve(self, num_trainers: int, replica_sizes: Sequence[int]) -> None: ...

    async def fork_replica(
        self, lost_group: WorkerGroup, groups: Sequence[WorkerGroup], log_folder: Path
    ) -> WorkerGroup: ...

    def on_signal(self, callback: Callable[[str], object]) -> None: ...

    async def close(self) -> None: ...


class RunRanks:
    """All ranks of a run: the trainers' group, then the engine replicas' groups. Ranks are numbered in this order."""

    def __init__(self, trainers: WorkerGroup, replicas: Sequence[WorkerGroup] = ()) -> None:
        self.trainers, self.replicas = trainers, list(replicas)
        self.nodes: RanksNodes | None = None
        """Nodes of the ranks. None: the caller manages them."""
        self.is_separate = bool(replicas)
        """Whether the engines have ranks of their own (rollout.placement = separate)."""
        self.on_lost: Callable[[WorkerGroup, Exception], object] | None = None
        """Callback (group, error) for an engine replica lost while others live. None: losing one ends the run."""
        self.on_removed: Callable[[str], object] = lambda reason: None
        """Callback (reason) for each removed replica, called before `on_lost`."""
        self._hang_report: HangReport | None = None
        self._closing: asyncio.Future[None] | None = None
        self._notify: Callable[[str], object] = lambda report: None

    @property
    def groups(self) -> list[WorkerGroup]:
        return [self.trainers, *self.replicas]

    @property
    def world_size(self) -> int:
        return sum(group.world_size for group in self.groups)

    @property
    def agents(self) -> list[AgentLink]:
        """The agents of the nodes with ranks. Some may be lost."""
        return list(dict.fromkeys(place.agent for group in self.groups for place in group.places))

    @property
    def topology(self) -> list[tuple[str, ...]]:
        return [place for group in self.groups for place in group.topology]

    @property
    def hosts(self) -> list[str]:
        return [host for group in self.groups for host in group.hosts]

    @property
    def local_ranks(self) -> list[int]:
        return [local_rank for group in self.groups for local_rank in group.local_ranks]

    def set_deadlines(self, make: Callable[[], Deadlines]) -> None:
        for group in self.groups:
            group.deadlines = make()

    def report_hangs(self, folder: Path, notify: Callable[[str], object]) -> None:
        """Whenever a rank falls silent, write the stacks and states of all ranks to a file in this folder.

        `notify` gets the names of silent ranks at once, and reports of slow ranks.
        """
        self._hang_report = HangReport(folder, lambda: [group.diagnosis for group in self.groups])
        self._notify = notify
        self._watch_groups(self.groups)

    def _watch_groups(self, groups: Sequence[WorkerGroup]) -> None:
        if self._hang_report is not None:
            for group in groups:
                group.report_hangs(self._hang_report, self._notify)

    def on_stop_signal(self, callback: Callable[[str], object]) -> None:
        """Set the callback (signal name) for a stop signal to any rank or agent."""
        for group in self.groups:
            group.on_stop_signal = callback
        if self.nodes is not None:
            self.nodes.on_signal(callback)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks of all groups. A lost replica has no answers."""
        engines = [self.answers_unless_lost(group, group.call(method, *args, **kwargs)) for group in self.replicas]
        answers = await gather_answers([self.trainers.call(method, *args, **kwargs), *engines])
        return list(chain.from_iterable(answers))

    async def begin_step(self, number: int) -> None:
        """Set the number of the step in driver and ranks, so tests can inject faults (`megarl.faults`)."""
        if faults.text():
            faults.begin_step(number)
            await self.call("__step__", number)

    async def call_with_first_rank(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all ranks, with each group's first rank in the run as last argument."""
        engines = [
            self.answers_unless_lost(group, group.call(method, *args, group.part.first_rank)) for group in self.replicas
        ]
        answers = await gather_answers([self.trainers.call(method, *args, self.trainers.part.first_rank), *engines])
        return list(chain.from_iterable(answers))

    async def call_engines(self, method: str, *args: Any) -> list[Any]:
        if not self.is_separate:
            return await self.trainers.call(method, *args)
        answers = await gather_answers(
            [self.answers_unless_lost(group, group.call(method, *args)) for group in self.replicas]
        )
        return list(chain.from_iterable(answers))

    async def ask(
        self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *args: Any, budget_seconds: float = 0.0
    ) -> list[Any]:
        """Call a method on some ranks of one group, as `WorkerGroup.ask` does. Raises PeerLostError if the group is
        lost.
        """
        group = next((group for group in self.groups if ranks[0] in group.part.ranks(group.world_size)), None)
        if group is None:
            raise PeerLostError(f"ranks {list(ranks)} are lost: all processes of their group have ended")
        local_ranks = [rank - group.part.first_rank for rank in ranks]
        try:
            return await group.ask(local_ranks, method, per_rank, *args, budget_seconds=budget_seconds)
        except PeerLostError as error:
            self.remove(group, error)
            raise

    def add(self, groups: Sequence[WorkerGroup]) -> None:
        """Include restarted replicas in later calls. They can sample after a reshard."""
        self._watch_groups(groups)
        self.is_separate = True
        self.replicas = sorted([*self.replicas, *groups], key=lambda group: group.part.first_rank)

    async def watching(self, driver_work: Coroutine[Any, Any, Answer]) -> Answer:
        """Await driver work that may call no ranks for long, such as scoring, and return its result.

        Removes a lost replica at once if others remain. Otherwise a lost rank cancels the work and raises
        PeerLostError.
        """
        work_task, loss_task = asyncio.ensure_future(driver_work), asyncio.create_task(self._await_loss())
        try:
            await asyncio.wait({work_task, loss_task}, return_when=asyncio.FIRST_COMPLETED)
            # The work's own call to a lost rank may fail too, with a better message.
            await asyncio.wait({work_task}, timeout=_CAUSE_SECONDS)
            return work_task.result() if work_task.done() else loss_task.result()
        finally:
            work_task.cancel()
            loss_task.cancel()
            await asyncio.wait({work_task, loss_task})
            for task in (work_task, loss_task):
                # asyncio warns about errors that nobody retrieves.
                _ = task.cancelled() or task.exception()

    async def _await_loss(self) -> NoReturn:
        """Remove lost replicas. Raises PeerLostError once the run cannot continue."""
        while True:
            for group in self.groups:
                lost_handles = [handle for handle in group.ranks.handles if handle.died.done()]
                for handle in lost_handles[:1]:
                    # A call to a lost rank fails at once, names the rank, and ends the group.
                    call = group.ask([handle.rank - group.part.first_rank], _NO_CALL, [None])
                    await self.answers_unless_lost(group, call)
            await asyncio.sleep(_WATCH_SECONDS)

    async def answers_unless_lost(self, group: WorkerGroup, call: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """Await a call to a replica and return its answers; none if it is lost and others remain."""
        try:
            return await call
        except PeerLostError as error:
            self.remove(group, error)
            return []

    def remove(self, group: WorkerGroup, error: PeerLostError) -> None:
        """Remove a lost replica. Raises `error` if the run cannot continue without it."""
        if group is self.trainers or self.on_lost is None or self.replicas == [group]:
            raise error
        if group in self.replicas:
            self.replicas.remove(group)
            self.on_removed(str(error))
            self.on_lost(group, error)

    def show_stacks(self) -> None:
        for group in self.groups:
            group.diagnosis.show_stacks()

    async def reserve(self, num_trainers: int, replica_sizes: Sequence[int]) -> None:
        """Check that the nodes have places for these ranks, or can get them. Raises ConfigError if not."""
        if self.nodes is not None:
            await self.nodes.reserve(num_trainers, replica_sizes)

    def begin_close(self) -> None:
        """Begin to close all groups. Ranks in a call are killed, even if they hang: it raises PeerLostError."""
        self._closing = asyncio.ensure_future(self.close_groups())

    async def close_groups(self) -> None:
        self.on_lost = None
        await asyncio.gather(*(group.close() for group in self.groups))

    async def close(self) -> None:
        await self.close_groups()
        if self.nodes is not None:
            await self.nodes.close()


async def gather_answers(calls: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Await calls to different groups concurrently, and return their answers.

    Raises the first error. If it only reflects that another group left a collective, raises that group's error. Other
    groups' calls continue, and end with their groups.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
    # A rank that only reports that a peer left a collective is not the cause. Wait for the cause's group to report.
    failed_tasks = [task for task in tasks if task.done() and task.exception() is not None]
    if failed_tasks and all(_is_echo(task.exception()) for task in failed_tasks):
        await asyncio.wait(tasks, timeout=_CAUSE_SECONDS)
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    if errors:
        for task in tasks:
            # asyncio warns about errors that nobody retrieves. These calls may still fail later.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        raise min(errors, key=_is_echo)
    return [task.result() for task in tasks]


def _is_echo(error: BaseException | None) -> bool:
    return isinstance(error, RankFailedError) and error.is_echo
