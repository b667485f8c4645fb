"""Measurement of an attempt's waiting time for the engines."""

from __future__ import annotations

import time

from megarl.rewards.http_rewards import COUNTED_FOR
from megarl.rollout.pool import Generates
from megarl.types import Completion, Request


class TimedPool:
    """The engines for one attempt, with a measurement of its waiting time. Concurrent completions count once.

    `seconds` excludes pauses of the engines, `seconds_by_clock` includes them. `is_followed` says another attempt waits
    for the end of this one. Then no request of this attempt counts as the last one.
    """

    def __init__(self, pool: Generates, *, is_followed: bool = False) -> None:
        self._pool, self._purpose, self._is_followed = pool, COUNTED_FOR.get(), is_followed
        self._num_awaited = 0
        self._began = self._held_before = 0.0
        self.seconds = self.seconds_by_clock = 0.0

    async def generate(self, request: Request, *, affinity: str | None = None, is_last: bool = False) -> Completion:
        """Sample one completion, and add the waiting time; see `EnginePool.generate`."""
        # The caller may be a server task with its own context variables: set the purpose of this attempt there.
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
        """Drop the affinity of a finished trajectory; see `EnginePool.forget`."""
        self._pool.forget(affinity)

    @property
    def seconds_held(self) -> float:
        """Total pause of the pool; see `EnginePool.seconds_held`."""
        return self._pool.seconds_held
