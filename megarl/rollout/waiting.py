"""How long an attempt waits for the engines."""

from __future__ import annotations

import time

from megarl.rewards.served import COUNTED_FOR
from megarl.rollout.pool import Generates
from megarl.types import Completion, Request


class TimedPool:
    """The engines for one attempt, and how long it waited for them; for several completions at once it waits once.

    `seconds` is that time but for what of it the engines were held, `seconds_by_clock` all of it. `is_followed`:
    another attempt waits for this one's end, and its requests follow on this one's last.
    """

    def __init__(self, pool: Generates, *, is_followed: bool = False) -> None:
        self._pool, self._purpose, self._is_followed = pool, COUNTED_FOR.get(), is_followed
        self._num_awaited = 0
        self._began = self._held_before = 0.0
        self.seconds = self.seconds_by_clock = 0.0

    async def generate(self, request: Request, *, affinity: str | None = None, is_last: bool = False) -> Completion:
        """As `EnginePool.generate`."""
        # A server that asks for an attempt, in a context of its own, asks for whom the attempt is made.
        COUNTED_FOR.set(self._purpose)
        if not self._num_awaited:
            self._began, self._held_before = time.monotonic(), self.seconds_held
        self._num_awaited += 1
        try:
            return await self._pool.generate(request, affinity=affinity, is_last=is_last and not self._is_followed)
        finally:
            self._num_awaited -= 1
            if not self._num_awaited:
                seconds = time.monotonic() - self._began
                self.seconds_by_clock += seconds
                self.seconds += max(0.0, seconds - (self.seconds_held - self._held_before))

    def forget(self, affinity: str) -> None:
        """As `EnginePool.forget`."""
        self._pool.forget(affinity)

    @property
    def seconds_held(self) -> float:
        """As `EnginePool.seconds_held`."""
        return self._pool.seconds_held
