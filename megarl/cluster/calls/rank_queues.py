"""First-in, first-out queues of calls, one per rank."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


class _QueuedCall:
    """A call in its ranks' queues. In `num_behind` of them it is not yet first."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.num_behind = len(ranks)
        self.may_run: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def mark_first_in_queue(self) -> None:
        """The call is now first in one more queue. Once it is first in all, it may run."""
        self.num_behind -= 1
        # `may_run` is done already if the waiting call was cancelled.
        if not self.num_behind and not self.may_run.done():
            self.may_run.set_result(None)


class RankQueues:
    """One queue of calls per rank. A call runs while it is first in the queues of all its ranks.

    It joins all its queues at once, without an `await` in between. So every queue has the calls in the order in which
    they were made, which ensures:

    - Order: of two calls with a common rank, the earlier one runs first. Locks would not ensure this: while
    a call waits for rank 0, a later call could lock rank 1 first.
    - No deadlock: the earliest unfinished call is first in all its queues.
    - No starvation: only earlier calls, a finite number, precede a call.
    - Independence: calls to disjoint ranks do not wait for each other. They do if a call to ranks of both waits between
    them.
    """

    def __init__(self, num_ranks: int) -> None:
        self._queues: list[deque[_QueuedCall]] = [deque() for _ in range(num_ranks)]

    @asynccontextmanager
    async def hold(self, ranks: Sequence[int]) -> AsyncIterator[None]:
        """Wait until this call is first on all these ranks. It stays first in this context."""
        call = _QueuedCall(ranks)
        for rank in ranks:
            self._queues[rank].append(call)
            if self._queues[rank][0] is call:
                call.mark_first_in_queue()
        try:
            await call.may_run
            yield
        finally:
            for rank in ranks:
                self._leave_queue(rank, call)

    def _leave_queue(self, rank: int, call: _QueuedCall) -> None:
        queue = self._queues[rank]
        if queue[0] is not call:
            queue.remove(call)
            return
        queue.popleft()
        if queue:
            queue[0].mark_first_in_queue()
