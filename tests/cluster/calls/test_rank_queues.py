"""Calls to sets of ranks: first come, first served on every rank, side by side where they share none."""

from __future__ import annotations

import asyncio
import random

import pytest

from megarl.cluster.calls.rank_queues import RankQueues


@pytest.mark.parametrize("seed", range(20))
async def test_every_rank_serves_one_call_at_a_time_in_the_order_in_which_they_were_made(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = 5
    served: list[list[int]] = [[] for _ in range(num_ranks)]
    busy: set[int] = set()

    async def call(queues: RankQueues, number: int, ranks: list[int], num_waits: int) -> None:
        async with queues.hold(ranks):
            assert not busy & set(ranks)
            busy.update(ranks)
            for rank in ranks:
                served[rank].append(number)
            try:
                for _ in range(num_waits):
                    await asyncio.sleep(0)
            finally:
                busy.difference_update(ranks)

    async def drive() -> list[tuple[int, list[int]]]:
        queues = RankQueues(num_ranks)
        made = []
        for number in range(80):
            ranks = rng.sample(range(num_ranks), rng.choice((1, 1, 2, 3, num_ranks)))
            made.append((ranks, asyncio.create_task(call(queues, number, ranks, rng.randrange(4)))))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                rng.choice(made)[1].cancel()
        _, stuck = await asyncio.wait([task for _, task in made], timeout=60)
        assert not stuck
        assert not [error for _, task in made if not task.cancelled() and (error := task.exception())]
        return [(number, ranks) for number, (ranks, _) in enumerate(made)]

    made = await drive()
    for rank, numbers in enumerate(served):
        asked = [number for number, ranks in made if rank in ranks]
        assert numbers == [number for number in asked if number in numbers]
        assert len(numbers) > len(asked) / 2  # the others were cancelled


async def test_a_call_that_waits_for_one_rank_is_not_overtaken_on_another() -> None:
    order: list[str] = []

    async def call(queues: RankQueues, name: str, ranks: list[int], go: asyncio.Event) -> None:
        async with queues.hold(ranks):
            order.append(name)
            await go.wait()

    queues = RankQueues(3)
    held, free = asyncio.Event(), asyncio.Event()
    free.set()
    first = asyncio.create_task(call(queues, "rank 0", [0], held))
    others = [
        asyncio.create_task(call(queues, name, ranks, free))
        for name, ranks in (("ranks 0, 1", [1, 0]), ("rank 1", [1]), ("rank 2", [2]))
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    assert order == ["rank 0", "rank 2"]
    held.set()
    await asyncio.gather(first, *others)
    assert order == ["rank 0", "rank 2", "ranks 0, 1", "rank 1"]
