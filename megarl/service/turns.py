"""Turns of the ranks: training calls run one at a time, and requests for the same weights sample together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


class Turns:
    """Turns in the order of the requests. asyncio's lock serves its waiters in this order.

    A model waits with one call at a time, so models take turns. `start_training` frees the device for the trainer,
    `start_sampling(version)` brings a version's weights into the engines.
    """

    def __init__(
        self,
        start_training: Callable[[], Awaitable[object]],
        start_sampling: Callable[[str | None], Awaitable[object]],
    ) -> None:
        self._start_training, self._start_sampling = start_training, start_sampling
        self._lock = asyncio.Lock()
        self._is_sampling = False
        self._version: str | None = None
        self._num_sampling = 0
        self._drained = asyncio.Event()
        self._drained.set()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Context of a training call: it has the trainer alone, and no request samples."""
        # The lock is held to the end of the call: its collectives must not mix with other calls.
        async with self._lock:
            await self._stop_sampling()
            yield

    @asynccontextmanager
    async def sampling(self, version: str | None) -> AsyncIterator[None]:
        """Context of a sampling request: the engines have this version. Requests for one version share it."""
        async with self._lock:
            if not (self._is_sampling and self._version == version):
                await self._stop_sampling()
                await self._start_sampling(version)
                self._is_sampling, self._version = True, version
            self._num_sampling += 1
            self._drained.clear()
        # The lock is free here, so that more requests for this version can join.
        try:
            yield
        finally:
            self._num_sampling -= 1
            if not self._num_sampling:
                self._drained.set()

    async def _stop_sampling(self) -> None:
        # Requests finish before the weights change: one completion has one version.
        await self._drained.wait()
        if self._is_sampling:
            await self._start_training()
            self._is_sampling = False
