"""Pool of environment processes. Each runs one attempt at a time, so killing one affects no other attempt.

A thread asks a process over a socket, and the event loop awaits the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from megarl.environments import EnvironmentUnavailableError, Start, Step, Turn
from megarl.environments.process import EnvironmentProcess, MakeProcess, Process, ProcessSettings
from megarl.types import PeerLostError, Problem

Result = TypeVar("Result")


class EnvironmentProcessError(EnvironmentUnavailableError):
    """The process of an environment ended or gave an invalid answer. The attempt may be retried in another process."""


class RaisedError(Exception):
    """Exception raised by an environment in its process. The text begins with the error's type and a colon."""


class EnvironmentPool:
    """Processes for attempts: started on demand, at most `num_processes`, retained until `close`.

    A process is killed and replaced if it hangs, ended or is no longer fit. Output of environments goes to
    `log_folder/environment_NNNN.log`, numbered from `first_log`. `make_process` starts a process, here or elsewhere.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        *,
        num_processes: int,
        log_folder: Path | None = None,
        first_log: int = 0,
        make_process: MakeProcess = EnvironmentProcess,
    ) -> None:
        # Two threads a process: one asks it, another can kill it meanwhile.
        self._threads = ThreadPoolExecutor(max(1, 2 * num_processes), thread_name_prefix="environment")
        logs = [
            str(log_folder.absolute() / f"environment_{number:04d}.log") if log_folder else None
            for number in range(first_log, first_log + num_processes)
        ]
        self._seats = [Seat(lambda log=log: make_process(settings, log), self._threads) for log in logs]
        self._free: asyncio.LifoQueue[Seat] = asyncio.LifoQueue()  # Reuse seats with a running process first.
        for seat in reversed(self._seats):
            self._free.put_nowait(seat)

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[Seat]:
        """Provide a process for one attempt as soon as one is free, with its environment imported.

        Raises ConfigError if the environment cannot be imported there, PeerLostError if the process does not start.
        """
        seat = await self._free.get()
        try:
            seat.num_killed = 0
            await seat.ready()
            yield seat
        finally:
            self._free.put_nowait(seat)

    def close(self) -> None:
        """Kill the processes. Calling it again does nothing."""
        for seat in self._seats:
            seat.kill()
        self._threads.shutdown()


class Seat:
    """Place for a process: empty before the first one and after a kill."""

    def __init__(self, make: Callable[[], Process], threads: ThreadPoolExecutor) -> None:
        self._make = make
        self._threads = threads
        self._process: Process | None = None
        self.num_killed = 0
        """Number of this attempt's processes that were killed or ended."""

    def environment(self) -> SeatedEnvironment:
        """Return the environment of an attempt in this process."""
        return SeatedEnvironment(self)

    async def ready(self) -> None:
        """Start a process if there is none, and wait until it is ready. Retry once if it ends meanwhile.

        Errors are described at `EnvironmentPool.seat`.
        """
        with suppress(PeerLostError):
            await self._start()
            return
        await self._start()

    async def _start(self) -> None:
        if self._process is None:
            self._process = self._make()
        try:
            await self._awaited(self._process.wait_until_ready)
        except BaseException:
            self.kill()
            raise

    async def ask(self, request: dict[str, Any]) -> Any:
        """Return the value of a request's answer. If cancelled, kill the process.

        Raises RaisedError for errors of the environment, EnvironmentUnavailableError, and EnvironmentProcessError if
        the process is gone.
        """
        if self._process is None:
            raise EnvironmentProcessError("the environment's process was killed")
        answer = await self._awaited(lambda process=self._process: process.ask(request))
        if answer.keys() & {"ended", "lost"} or answer.get("is_last"):
            self.kill()
        if "ended" in answer:
            raise EnvironmentProcessError(f"the environment's process {answer['ended']}")
        if "lost" in answer or "unavailable" in answer:
            raise EnvironmentUnavailableError(str(answer.get("lost") or answer.get("unavailable")))
        if "error" in answer:
            raise RaisedError(str(answer["error"]))
        return answer.get("value")

    @property
    def is_empty(self) -> bool:
        return self._process is None

    def kill(self) -> None:
        """Kill the process, if any, and all its descendants, without waiting."""
        process, self._process = self._process, None
        if process is not None:
            self.num_killed += 1
            self._threads.submit(process.close)

    async def _awaited(self, call: Callable[[], Result]) -> Result:
        """Return the result of a blocking call made in a thread."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except asyncio.CancelledError:
            self.kill()  # Ends the waiting thread; a late answer cannot be mixed up.
            raise


class SeatedEnvironment:
    """Environment running in another process."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    async def reset(self, problem: Problem, seed: int) -> Start:
        await self._seat.ready()  # A retried attempt may need a new process.
        value = await self._seat.ask({"do": "reset", "problem": asdict(problem), "seed": seed})
        return Start(tuple(value["messages"]), tuple(value["tools"]))

    async def step(self, turn: Turn) -> Step:
        value = await self._seat.ask({"do": "step", "turn": asdict(turn)})
        return Step(**{**value, "messages": tuple(value["messages"])})

    async def close(self) -> None:
        if not self._seat.is_empty:
            await self._seat.ask({"do": "close"})
