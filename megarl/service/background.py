"""Work that goes on when the request that began it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Background:
    """The running tasks of this kind."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run_to_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await work that goes on if its request is cancelled, for example by the end of a session.

        Ranks cannot leave a collective. A folder that vanished under them would be an error of theirs, which ends the
        whole service.
        """
        return await asyncio.shield(self.start(work))

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work)
        # asyncio itself keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
