"""The driver's side of the engines: a pool that any number of coroutines sample from. No torch."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from megarl.cluster.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.types import Completion, Request

BUDGET_SECONDS = 1.0
"""Time limit of one call of `advance`: how long an engine runs between two exchanges with the driver."""
_MARGIN = 2
"""Requests that a replica may have beyond the least loaded one and still receive its trajectories' next requests."""
Result = TypeVar("Result")
Queue = OrderedDict[str, Request]
"""Requests by id, first in first out; any of thousands may be removed before its turn, in constant time."""


class AbandonedError(Exception):
    """Sampling was abandoned; all its requests have left the engines."""


class _Replica:
    """The state of an engine replica: requests it runs, requests that wait for it, its pump."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.running: set[str] = set()
        self.waiting: Queue = OrderedDict()
        self.aborts: list[str] = []
        self.pump: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)


class EnginePool:
    """Engine replicas for any number of coroutines, with one pump per replica, independent of the others.

    `max_running` bounds the requests that a replica runs. Requests are admitted in the order in which they were filed,
    so that those of one prompt share a replica's prefix cache; a replica that finishes early is given more.

    An engine runs until a sixteenth of its requests have finished, at most `budget_seconds`; the driver's other tasks,
    such as scoring, go on meanwhile. The error of a pump is raised by all requests, later ones too.
    """

    def __init__(
        self, ranks: WorkerGroup, layout: ParallelConfig, *, max_running: int, budget_seconds: float = BUDGET_SECONDS
    ) -> None:
        self._ranks = ranks
        self._max_running = max_running
        self._budget_seconds = budget_seconds
        tp = layout.rollout_tp
        self._replicas = [_Replica(range(leader, leader + tp)) for leader in layout.leaders()]
        self._waiting: Queue = OrderedDict()
        self._futures: dict[str, asyncio.Future[tuple[Completion, _Replica]]] = {}
        self._homes: dict[str, _Replica] = {}
        self._failure: Exception | None = None

    async def generate(self, request: Request, *, affinity: str | None = None) -> Completion:
        """Sample one completion; cancelling this aborts it.

        Requests of one `affinity`, a trajectory's name, go to the replica that has its tokens in its prefix cache,
        unless that has a much higher load than another.

        Raises ValueError for a request id that is in use, and the error of a pump that failed.
        """
        if self._failure is not None:
            raise self._failure
        if request.request_id in self._futures:
            raise ValueError(f"request {request.request_id} is running already")
        future: asyncio.Future[tuple[Completion, _Replica]] = asyncio.get_running_loop().create_future()
        self._futures[request.request_id] = future
        self._queue_for(affinity)[request.request_id] = request
        self._start_pumps()
        try:
            completion, replica = await future
        finally:
            del self._futures[request.request_id]
            if future.cancelled() or future.exception():
                self._withdraw(request)
        if affinity is not None:
            self._homes[affinity] = replica
        return completion

    def forget(self, affinity: str) -> None:
        """Drop the affinity of a trajectory that has ended."""
        self._homes.pop(affinity, None)

    async def drained(self) -> None:
        """Wait until all cancelled and finished requests have left the engines."""
        while pumps := [r.pump for r in self._replicas if r.pump is not None and not r.pump.done()]:
            await asyncio.wait(pumps)

    def _queue_for(self, affinity: str | None) -> Queue:
        home = self._homes.get(affinity) if affinity is not None else None
        if home is None or home.load > min(replica.load for replica in self._replicas) + _MARGIN:
            return self._waiting
        return home.waiting

    def _withdraw(self, request: Request) -> None:
        """Remove a cancelled request from its queue, or have its engine abort it."""
        self._waiting.pop(request.request_id, None)
        for replica in self._replicas:
            replica.waiting.pop(request.request_id, None)
            if request.request_id in replica.running:
                replica.aborts.append(request.request_id)
        if self._failure is None:
            self._start_pumps()

    def _start_pumps(self) -> None:
        for replica in self._replicas:
            if replica.pump is None or replica.pump.done():
                replica.pump = asyncio.create_task(self._pump(replica))

    async def _pump(self, replica: _Replica) -> None:
        """Run an engine while it has requests."""
        try:
            while True:
                new = self._admitted(replica)
                if not replica.running:
                    return
                await self._advance(replica, new)
                # Who waited for a completion files its next request now.
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(error)

    def _admitted(self, replica: _Replica) -> tuple[Request, ...]:
        """Dequeue the requests that a replica has room for: its own, then its share of those for all."""
        unfinished = len(self._waiting) + sum(r.load for r in self._replicas)
        share = -(-unfinished // len(self._replicas))
        own = min(len(replica.waiting), self._max_running - len(replica.running))
        new = [replica.waiting.popitem(last=False)[1] for _ in range(own)]
        room = min(self._max_running, share) - len(replica.running) - len(new)
        new += [self._waiting.popitem(last=False)[1] for _ in range(min(len(self._waiting), room))]
        replica.running.update(request.request_id for request in new)
        return tuple(new)

    async def _advance(self, replica: _Replica, new: tuple[Request, ...]) -> None:
        aborts = tuple(name for name in replica.aborts if name in replica.running)
        replica.aborts = []
        work: tuple[tuple[Request, ...], tuple[str, ...]] = (new, aborts)
        per_rank = [work, *[((), ())] * (len(replica.ranks) - 1)]
        leave_after = max(1, len(replica.running) // 16)
        budget = self._budget_seconds
        completions, *_ = await self._ranks.ask(
            replica.ranks, "advance", per_rank, budget, leave_after, budget_seconds=budget
        )
        for completion in completions:
            replica.running.discard(completion.request_id)
            future = self._futures.get(completion.request_id)
            if future is not None and not future.done():
                future.set_result((completion, replica))

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        for future in self._futures.values():
            if not future.done():
                future.set_exception(self._failure)


async def gather_unless_abandoned(
    pool: EnginePool, attempts: Iterable[Coroutine[Any, Any, Result]], is_abandoned: Callable[[], bool]
) -> list[Result]:
    """Run attempts concurrently; returns their results in order.

    Raises AbandonedError once `is_abandoned` is true, and the first error of an attempt; then all others are cancelled
    and their requests have left the engines.
    """
    tasks = [asyncio.create_task(attempt) for attempt in attempts]
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=BUDGET_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if waiting and is_abandoned():
                raise AbandonedError
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.drained()
        raise
    return [task.result() for task in tasks]
