"""Restarts of lost engine replicas, in the background of a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.ranks.stacks import name_engine
from megarl.types import MegarlError

_MOST_STARTS = 3
"""Maximum attempts to restart a replica."""


class Replacements:
    """Restarts lost engine replicas in the background.

    `start(lost)` starts ranks in the places of a lost group and constructs its engine. `notify` gets one-line messages.
    """

    def __init__(self, start: Callable[[WorkerGroup], Awaitable[WorkerGroup]], notify: Callable[[str], object]) -> None:
        self._start, self._notify = start, notify
        self._starting: set[asyncio.Task[None]] = set()
        self._ready: list[WorkerGroup] = []

    def replace(self, lost_group: WorkerGroup, error: Exception, num_left: int) -> None:
        """Restart a lost replica. `num_left` is the number of remaining ones."""
        self._notify(
            f"{self._name_replica(lost_group)} is lost: {error}. Its requests move to the remaining engines "
            f"({num_left}). The lost engine is being restarted"
        )
        task = asyncio.create_task(self._restart(lost_group))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    @property
    def has_started(self) -> bool:
        return bool(self._ready)

    def take(self) -> list[WorkerGroup]:
        ready, self._ready = self._ready, []
        return ready

    async def close(self) -> None:
        """Cancel restarts in progress, and close the replicas that `take` did not return."""
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(group.close() for group in self.take()))

    async def _restart(self, lost_group: WorkerGroup) -> None:
        """Start a lost replica's ranks again, with a few attempts. The replica is then ready for the next reshard."""
        began = time.monotonic()
        # The old processes must be gone before new processes use their GPUs.
        await lost_group.close()
        for attempt in range(1, _MOST_STARTS + 1):
            try:
                group = await self._start(lost_group)
            except Exception as error:
                reason = str(error) if isinstance(error, MegarlError) else repr(error)
                self._notify(
                    f"{self._name_replica(lost_group)} failed to restart, attempt {attempt} of {_MOST_STARTS}: {reason}"
                )
            else:
                self._ready.append(group)
                seconds = time.monotonic() - began
                self._notify(
                    f"{self._name_replica(lost_group)} has started again in {seconds:.1f} s; it samples after the next "
                    "reshard"
                )
                return
        self._notify(f"{self._name_replica(lost_group)} stays lost: there are no more attempts to restart it")

    def _name_replica(self, group: WorkerGroup) -> str:
        return name_engine(group.part.ranks(group.world_size))
