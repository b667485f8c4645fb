"""All ranks of a run: the trainers' group and, where engines are separate, a group of its own for each replica.

A group is a domain of failure and has one world of `torch.distributed`; ranks of different groups meet on a bridge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from megarl.cluster.deadlines import Deadlines
from megarl.cluster.worker_group import RankFailedError, WorkerGroup

_CAUSE_SECONDS = 2.0
"""After a failure the other groups have so long to tell of an earlier one."""

Answer = TypeVar("Answer")


class RunRanks:
    """The ranks of all groups of a run, by their numbers in the run: the trainers' first, then replica by replica."""

    def __init__(self, trainers: WorkerGroup, replicas: Sequence[WorkerGroup] = ()) -> None:
        self.trainers, self.replicas = trainers, list(replicas)
        self._num_bridges = 0

    @property
    def groups(self) -> list[WorkerGroup]:
        """The trainers' group, then those of the replicas."""
        return [self.trainers, *self.replicas]

    @property
    def world_size(self) -> int:
        """The ranks of all groups."""
        return sum(group.world_size for group in self.groups)

    @property
    def is_separate(self) -> bool:
        """Whether the engines have ranks of their own."""
        return bool(self.replicas)

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
        """As of a group: call the method on all ranks of all groups at once."""
        found = await together([group.call(method, *args, **kwargs) for group in self.groups])
        return [answer for answers in found for answer in answers]

    async def call_engines(self, method: str, *args: Any) -> list[Any]:
        """Call the method on all ranks that have engines."""
        found = await together([group.call(method, *args) for group in self.replicas or [self.trainers]])
        return [answer for answers in found for answer in answers]

    async def ask(
        self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *args: Any, budget_seconds: float = 0.0
    ) -> list[Any]:
        """As of a group: call the method on some ranks, all of one group."""
        group = next(group for group in reversed(self.groups) if group.part.first_rank <= ranks[0])
        own = [rank - group.part.first_rank for rank in ranks]
        return await group.ask(own, method, per_rank, *args, budget_seconds=budget_seconds)

    async def join(self, version: int) -> None:
        """Bridge the groups: from now on `reshard` moves weights between them. The engines have this version then.

        A bridge that was there before is left.
        """
        self._num_bridges += 1
        name, topology = f"bridge_{self._num_bridges}", self.topology
        firsts = [sum(group.world_size for group in self.groups[:index]) for index in range(len(self.groups))]
        await together(
            [
                group.call("join", self.trainers.meeting, name, first, topology, version)
                for group, first in zip(self.groups, firsts, strict=True)
            ]
        )

    def show_stacks(self) -> None:
        """As of a group."""
        for group in self.groups:
            group.show_stacks()

    async def close(self) -> None:
        """Close all groups."""
        await asyncio.gather(*(group.close() for group in self.groups))


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
