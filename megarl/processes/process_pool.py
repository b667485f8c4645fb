"""Pool of processes answering requests.

A thread exchanges messages with a process over a socket, and the event loop waits for the thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from megarl.processes.server_process import NO_LIMITS, MakeServer, RequestLimits, Server, ServerProcess, ServerSettings
from megarl.types import PeerLostError

Result = TypeVar("Result")


class ProcessPool:
    """Pool of up to `num_processes` processes: started on demand, reused until `close`, replaced after a kill.

    A process serves one user at a time, so killing it affects no other user. Output of the processes goes to
    `log_folder/LOG_NAME_NNNN.log`, numbered from `first_log`. `make_server` starts a process, on this machine or
    another one. Different event loops may use a pool one after another.
    """

    def __init__(
        self,
        settings: ServerSettings,
        num_processes: int,
        *,
        log_name: str,
        log_folder: Path | None = None,
        first_log: int = 0,
        make_server: MakeServer = ServerProcess,
    ) -> None:
        self.is_closed = False
        # Two threads per process: one asks it, another can kill it meanwhile.
        self._threads = ThreadPoolExecutor(max(1, 2 * num_processes), thread_name_prefix=log_name)
        logs = [
            str(log_folder.absolute() / f"{log_name}_{log_number:04d}.log") if log_folder else None
            for log_number in range(first_log, first_log + num_processes)
        ]
        self.places = [Place(self, lambda log=log: make_server(settings, log)) for log in logs]
        # Last in, first out: places with a running process are reused first.
        self._free = list(reversed(self.places))
        # Unlike asyncio's futures, these belong to no event loop.
        self._waiting: deque[ThreadFuture[Place]] = deque()

    def __len__(self) -> int:
        return len(self.places)

    def start(self) -> None:
        """Start all processes without waiting for them. Raises PeerLostError if the machine cannot start one."""
        for place in self.places:
            place.start()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """Reserve a place for one process, as soon as a place is free."""
        place = await self._take_place()
        try:
            place.num_killed = 0
            yield place
        finally:
            self._release_place(place)

    def close(self) -> None:
        """Kill all processes. A second call does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        for place in self.places:
            place.kill()
        # Queued calls are not cancelled (`cancel_futures`), because kills may be among them. By the time a queued
        # request runs, its process has been killed, so the request fails and does not block.
        self._threads.shutdown()

    async def run_in_thread(self, call: Callable[[], Result]) -> Result:
        """Run a blocking call in a thread and return its result.

        Raises PeerLostError if the pool is closed before or during the call.
        """
        if self.is_closed:
            raise PeerLostError("the pool of child processes is closed")
        result = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        if self.is_closed:
            raise PeerLostError("the pool of child processes was closed during a request")
        return result

    def submit(self, call: Callable[[], None]) -> None:
        """Run a blocking call in a thread, without waiting for it. `close` waits for it."""
        self._threads.submit(call)

    async def _take_place(self) -> Place:
        """Return a free place, or wait for the next place that `_release_place` assigns."""
        if self._free:
            return self._free.pop()
        promised_place: ThreadFuture[Place] = ThreadFuture()
        self._waiting.append(promised_place)
        try:
            return await asyncio.wrap_future(promised_place)
        except asyncio.CancelledError:
            # It cannot be cancelled if `_release_place` has already assigned a place.
            if not promised_place.cancel():
                self._release_place(promised_place.result())
            raise

    def _release_place(self, place: Place) -> None:
        """Give the place to the first user who still waits for one, otherwise free it."""
        while self._waiting:
            promised_place = self._waiting.popleft()
            if promised_place.set_running_or_notify_cancel():
                promised_place.set_result(place)
                return
        # An empty place is taken last, because its user would wait for a new process.
        self._free.insert(0 if place.process is None else len(self._free), place)


class Place:
    """Place in the pool for one process. It is empty at first, and after its process was killed."""

    def __init__(self, pool: ProcessPool, make: Callable[[], Server]) -> None:
        self._pool = pool
        self._make = make
        self.process: Server | None = None
        self._introduced: tuple[Server, dict[str, Any]] | None = None
        self.num_killed = 0
        """Number of this place's processes killed or ended since a user reserved it."""

    def start(self) -> Server:
        """Start a process if the place is empty, without waiting for it."""
        if self.process is None:
            self.process = self._make()
        return self.process

    async def ready(self) -> dict[str, Any]:
        """Start a process if the place is empty, wait until it is ready, and return its introduction.

        If the process ends meanwhile, a second one is started. Raises ConfigError if the process refuses to start,
        PeerLostError if the second one ends too or the pool is closed.
        """
        # A failure empties the place, so the second call starts a new process.
        with suppress(PeerLostError):
            return await self._wait_until_introduced()
        return await self._wait_until_introduced()

    async def _wait_until_introduced(self) -> dict[str, Any]:
        """Return the process's introduction; start the process if necessary."""
        if self._pool.is_closed:
            raise PeerLostError("the pool of child processes is closed")
        process = self.process
        if self._introduced and self._introduced[0] is process:
            # Without a thread: passing work to one takes about as long as scoring a short answer.
            return self._introduced[1]
        try:
            process = self.start()
            introduction = await self._pool.run_in_thread(process.wait_until_ready)
        except BaseException:
            self.kill()
            raise
        self._introduced = process, introduction
        return introduction

    async def request(self, message: Mapping[str, Any], limits: RequestLimits = NO_LIMITS) -> dict[str, Any]:
        """Send a request to the process. Return its answer, or a dictionary with the reason why there is none.

        The reasons are those of `ServerProcess.request`. A cancelled call kills the process.
        """
        process = self.process
        if process is None:
            return {"ended": "was killed"}
        try:
            answer = await self._pool.run_in_thread(lambda: process.request(message, limits))
        except BaseException:
            self.kill()  # Ends the waiting thread; a late answer cannot be mixed up.
            raise
        if answer.keys() & {"ended", "lost", "overdue", "violation"}:
            self.kill()
        return answer

    def kill(self) -> None:
        """Kill this place's process and its descendants. Does not wait for their ends. Does nothing without a
        process.
        """
        process, self.process = self.process, None
        if process is not None:
            self.num_killed += 1
            self._pool.submit(process.close)
