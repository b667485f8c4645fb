"""The driver's side of the engines: requests out to the replicas, completions back as they finish."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

from megarl.parallel_layout import ParallelLayout
from megarl.types import Completion, Request
from megarl.workers.group import WorkerGroup


async def sample(
    group: WorkerGroup,
    layout: ParallelLayout,
    requests: Iterable[Request],
    *,
    max_running: int,
    budget_seconds: float = 1.0,
) -> AsyncIterator[Completion]:
    """Sample all requests over all replicas, yielding completions in the order in which they finish.

    Requests stay in order, so that those of one prompt meet in one replica's prefix cache; a replica that is done
    early is given more. `max_running` bounds the requests one replica holds, `budget_seconds` how long the engines
    run between two looks of the driver: its other tasks, such as scoring, go on meanwhile.
    """
    waiting = deque(requests)
    running = dict.fromkeys(layout.leaders(), 0)
    while waiting or any(running.values()):
        per_rank: list[tuple[tuple[Request, ...], tuple[str, ...]]] = [((), ())] * layout.world_size
        share = -(-(len(waiting) + sum(running.values())) // len(running))
        for leader, held in running.items():
            new = tuple(waiting.popleft() for _ in range(min(len(waiting), min(max_running, share) - held)))
            per_rank[leader] = (new, ())
            running[leader] += len(new)
        results: list[Any] = await group.scatter("advance", per_rank, budget_seconds)
        for leader in running:
            running[leader] -= len(results[leader])
            for completion in results[leader]:
                yield completion
