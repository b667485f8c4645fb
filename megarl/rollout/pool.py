"""The driver's side of the engines: requests out to the replicas, completions back as they finish."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from megarl.cluster.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.types import Completion, Request


class AbandonedError(Exception):
    """Sampling was given up half-way; the engines hold nothing of it any more."""


async def sample(
    group: WorkerGroup,
    layout: ParallelConfig,
    requests: Iterable[Request],
    *,
    max_running: int,
    budget_seconds: float = 1.0,
    is_abandoned: Callable[[], bool] = lambda: False,
) -> AsyncIterator[Completion]:
    """Sample all requests over all replicas, yielding completions in the order in which they finish.

    Requests stay in order, so that those of one prompt meet in one replica's prefix cache; a replica that is done
    early is given more. `max_running` bounds the requests one replica holds, `budget_seconds` how long the engines
    run between two looks of the driver: its other tasks, such as scoring, go on meanwhile. Raises AbandonedError at
    such a look, all requests aborted, once `is_abandoned` says so.
    """
    waiting = deque(requests)
    running: dict[int, set[str]] = {leader: set() for leader in layout.leaders()}
    while waiting or any(running.values()):
        if is_abandoned():
            aborts = [((), tuple(running.get(rank, ()))) for rank in range(layout.world_size)]
            await group.scatter("advance", aborts, 0.0)
            raise AbandonedError
        per_rank: list[tuple[tuple[Request, ...], tuple[str, ...]]] = [((), ())] * layout.world_size
        share = -(-(len(waiting) + sum(map(len, running.values()))) // len(running))
        for leader, held in running.items():
            new = tuple(waiting.popleft() for _ in range(min(len(waiting), min(max_running, share) - len(held))))
            per_rank[leader] = (new, ())
            held.update(request.request_id for request in new)
        results: list[Any] = await group.scatter("advance", per_rank, budget_seconds, budget_seconds=budget_seconds)
        for leader, held in running.items():
            held.difference_update(completion.request_id for completion in results[leader])
            for completion in results[leader]:
                yield completion
