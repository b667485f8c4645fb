"""First-in, first-out queues of calls, one per rank, for calls to overlapping sets of ranks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


class _Turn:
    """A call waiting in the queues of its ranks. It is not yet first in `num_behind` of them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.num_behind = len(ranks)
        self.has_come: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def be_first(self) -> None:
        """Record that the call became first in one more queue. When it is first in all, it may run."""
        self.num_behind -= 1
        # `has_come` is done already if the waiting call was cancelled.
        if not self.num_behind and not self.has_come.done():
            self.has_come.set_result(None)


class RankQueues:
    """One queue of calls per rank. A call runs while it is at the head of the queues of all its ranks.

    A call joins all its queues at once, without an `await` in between. So every queue holds the calls in the order in
    which they were made. This gives:

    - Order: of two calls with a common rank, the earlier one runs first, on every common rank. One lock per rank, taken
      in turn, would not ensure this. A call waiting for rank 0 has not yet asked for rank 1. A later call for rank 1
      alone would overtake it.
    - No deadlock: the earliest of all unfinished calls is at the head of all its queues, so it runs.
    - No starvation: only earlier calls, a finite number, precede a call, and none joins them later. So a call to all
      ranks waits for the calls in progress, and later calls wait for it.
    - Independence: calls to disjoint ranks do not wait for each other, unless a call to ranks of both waits between
      them.
    """

    def __init__(self, num_ranks: int) -> None:
        self._queues: list[deque[_Turn]] = [deque() for _ in range(num_ranks)]

    @asynccontextmanager
    async def turn(self, ranks: Sequence[int]) -> AsyncIterator[None]:
        """Context in which a call runs: wait until it is first in the queues of all these ranks, and leave them at the
        end.

        A call cancelled while it waits leaves the queues.
        """
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
        """Remove a call from a rank's queue. If it was first, the next call becomes first."""
        queue = self._queues[rank]
        if queue[0] is not turn:
            queue.remove(turn)
            return
        queue.popleft()
        if queue:
            queue[0].be_first()
