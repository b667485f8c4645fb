"""Pool of environment processes."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.environments import EnvironmentUnavailableError, Start, Step, Turn
from megarl.processes.process_pool import Place, ProcessPool
from megarl.processes.server_process import MakeServer, ServerProcess, ServerSettings
from megarl.types import Problem


class EnvironmentProcessError(EnvironmentUnavailableError):
    """Raised if an environment's process ended or gave an invalid answer. The attempt may be retried in another
    process.
    """


class RaisedError(Exception):
    """Raised for an exception of an environment in its process. The text is `TYPE: message` of this exception."""


class EnvironmentPool:
    """At most `num_processes` processes for attempts, started on demand and reused until `close`.

    A process runs one attempt at a time, so killing it affects no other attempt. It is replaced if it hangs, ended, or
    cannot run another attempt. Output goes to `log_folder/environment_NNNN.log`, numbered from `first_log`.
    `make_server` starts a process, on this or another machine.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        num_processes: int,
        log_folder: Path | None = None,
        first_log: int = 0,
        make_server: MakeServer = ServerProcess,
    ) -> None:
        self._processes = ProcessPool(
            settings,
            num_processes,
            log_name="environment",
            log_folder=log_folder,
            first_log=first_log,
            make_server=make_server,
        )

    @asynccontextmanager
    async def reserve_process(self) -> AsyncIterator[ReservedProcess]:
        """Wait for a process that has imported the environment, and reserve it for one attempt.

        Raises ConfigError if the import fails, and PeerLostError if the process does not start.
        """
        async with self._processes.place() as process_place:
            await process_place.ready()
            yield ReservedProcess(process_place)

    def close(self) -> None:
        self._processes.close()


class ReservedProcess:
    """A process reserved for one attempt. If the process is restarted, the new one is reserved too."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    def num_killed(self) -> int:
        """Environment processes that ended or were killed during this attempt."""
        return self._place.num_killed

    def environment(self) -> RemoteEnvironment:
        return RemoteEnvironment(self._place)


class RemoteEnvironment:
    """Environment whose methods run in another process.

    Methods raise EnvironmentUnavailableError if the environment raises it, and RaisedError for its other exceptions.
    They raise EnvironmentProcessError if the process ended. A cancelled call kills the process.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    async def reset(self, problem: Problem, seed: int) -> Start:
        await self._place.ready()  # A retried attempt may need a new process.
        value = await self._request({"do": "reset", "problem": asdict(problem), "seed": seed})
        return Start(tuple(value["messages"]), tuple(value["tools"]), value["state"], value["role"])

    async def step(self, turn: Turn) -> Step:
        value = await self._request({"do": "step", "turn": asdict(turn)})
        return Step(**{**value, "messages": tuple(value["messages"])})

    async def close(self) -> None:
        if self._place.process is not None:
            await self._request({"do": "close"})

    async def _request(self, message: dict[str, Any]) -> Any:
        """Send a request to the environment's process and return its value. Kills a process that is unfit for more."""
        answer = await self._place.request(message)
        if answer.get("is_last"):
            self._place.kill()
        if end_text := answer.get("ended") or answer.get("violation"):
            raise EnvironmentProcessError(f"the environment's process {end_text}")
        if "lost" in answer:
            raise EnvironmentUnavailableError(f"the environment's process {answer['lost']}")
        if "unavailable" in answer:
            raise EnvironmentUnavailableError(str(answer["unavailable"]))
        if "invalid" in answer:
            raise RaisedError(
                f"TypeError: a value passed to the environment's process is not valid JSON: {answer['invalid']}"
            )
        if "error" in answer:
            raise RaisedError(str(answer["error"]))
        return answer.get("value")


def process_settings(environment: str, settings: Mapping[str, Any], memory_gib: float) -> ServerSettings:
    """Return the settings of environment processes. They run in the current folder with this process's import paths.

    `settings` are the environment's constructor arguments. `memory_gib` limits the address space.
    """
    folder = os.getcwd()
    return ServerSettings(
        "megarl.environments.environment_main:start",
        environment,
        "rollout.environment",
        {"environment": environment, "settings": dict(settings)},
        # An empty entry of sys.path means the current folder: name it explicitly.
        tuple(entry or folder for entry in sys.path),
        folder,
        memory_bytes=int(memory_gib * (1 << 30)),
    )
