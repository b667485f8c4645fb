"""Work that outlives its request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Background:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run_to_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await work. It continues if the waiting request is cancelled: ranks cannot leave a collective."""
        return await asyncio.shield(self.start(work))

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work)
        # asyncio keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
