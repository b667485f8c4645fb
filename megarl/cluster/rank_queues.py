"""Queues of calls to overlapping sets of ranks: first in, first out, per rank."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


class _Turn:
    """A call in the queues of its ranks; `num_behind` are those in which it is not yet first."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.num_behind = len(ranks)
        self.has_come: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def be_first(self) -> None:
        """Be first in one more queue; in the last of them, its turn has come."""
        self.num_behind -= 1
        if not self.num_behind and not self.has_come.done():
            self.has_come.set_result(None)


class RankQueues:
    """A queue of calls per rank; a call runs while it is at the head of the queues of all its ranks.

    A call joins all its queues at once, with no `await` between, so every queue has the calls in the order in which
    they were made. That gives:

    - Order: of two calls that share a rank, the one made first runs first, on every rank that they share. Ranks of
      which a lock each is taken one after the other do not promise that: who waits for rank 0 has not yet asked for
      rank 1, and a later call for rank 1 alone overtakes it.
    - No deadlock: of all calls that have not ended, the one made first is at the head of all its queues, so it runs.
    - No starvation: before a call stand only calls made before it, finitely many, and none joins them later. So a call
      of the whole world waits for those that are under way, and those that come after it wait for it.
    - Calls to disjoint ranks do not meet, unless a call to ranks of both waits between them.
    """

    def __init__(self, num_ranks: int) -> None:
        self._queues: list[deque[_Turn]] = [deque() for _ in range(num_ranks)]

    @asynccontextmanager
    async def turn(self, ranks: Sequence[int]) -> AsyncIterator[None]:
        """Within it the caller is first in the queues of all these ranks. A waiter that is cancelled leaves them."""
        turn = _Turn(ranks)
        for rank in ranks:
            self._queues[rank].append(turn)
            if self._queues[rank][0] is turn:
                turn.be_first()
        try:
            await turn.has_come
            yield
        finally:
            for rank in ranks:
                self._leave(rank, turn)

    def _leave(self, rank: int, turn: _Turn) -> None:
        queue = self._queues[rank]
        if queue[0] is not turn:
            queue.remove(turn)
            return
        queue.popleft()
        if queue:
            queue[0].be_first()
