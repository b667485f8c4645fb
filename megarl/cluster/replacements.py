"""Engine replicas that are started again, in the background, after their group was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from megarl.cluster.stacks import engine_named
from megarl.cluster.worker_group import WorkerGroup
from megarl.types import MegarlError

_MOST_STARTS = 3


class Replacements:
    """The groups that take the places of lost ones.

    `start` starts and constructs the engine of a group with so many ranks from this number on; `tell` hears what
    becomes of them, a line each.
    """

    def __init__(self, start: Callable[[int, int], Awaitable[WorkerGroup]], tell: Callable[[str], object]) -> None:
        self._start, self._tell = start, tell
        self._starting: set[asyncio.Task[None]] = set()
        self._ready: list[WorkerGroup] = []

    def replace(self, lost: WorkerGroup, error: Exception, num_left: int) -> None:
        """Start a lost group again."""
        self._tell(f"{self._name(lost)} is lost: {error}. Its requests go to the other {num_left}; it is started again")
        task = asyncio.create_task(self._replace(lost))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    @property
    def has_started(self) -> bool:
        """Whether there are groups to `take`."""
        return bool(self._ready)

    def take(self) -> list[WorkerGroup]:
        """The groups that have started since the call before."""
        ready, self._ready = self._ready, []
        return ready

    async def close(self) -> None:
        """End the starts that are under way, and the groups that nobody took."""
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(group.close() for group in self.take()))

    async def _replace(self, lost: WorkerGroup) -> None:
        began = time.monotonic()
        await lost.close()
        for attempt in range(1, _MOST_STARTS + 1):
            try:
                group = await self._start(lost.world_size, lost.part.first_rank)
            except Exception as error:
                told = str(error) if isinstance(error, MegarlError) else repr(error)
                self._tell(f"{self._name(lost)} does not start again, attempt {attempt} of {_MOST_STARTS}: {told}")
            else:
                self._ready.append(group)
                seconds = time.monotonic() - began
                self._tell(
                    f"{self._name(lost)} has started again in {seconds:.1f} s; it samples after the next reshard"
                )
                return
        self._tell(f"{self._name(lost)} stays lost: it is not started again")

    def _name(self, group: WorkerGroup) -> str:
        return engine_named(group.part.ranks(group.world_size))
