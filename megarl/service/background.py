"""Work that goes on when the request that began it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """The running tasks of this kind."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def run_to_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work of the ranks on a folder, which goes on if the end of a session cancels its request.

        A folder that vanished under the ranks would be an error of theirs, which ends the whole service.
        """
        await asyncio.shield(self.start(work))

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        # asyncio itself keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
