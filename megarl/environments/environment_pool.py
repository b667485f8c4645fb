"""Environments in a pool of processes. Each runs one attempt at a time, so killing one affects no other attempt."""

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
    """The process of an environment ended or gave an invalid answer. The attempt may be retried in another process."""


class RaisedError(Exception):
    """Exception raised by an environment in its process. The text begins with the error's type and a colon."""


class EnvironmentPool:
    """Processes for attempts: started on demand, at most `num_processes`, retained until `close`.

    A process is killed and replaced if it hangs, ended or is no longer fit. Output of environments goes to
    `log_folder/environment_NNNN.log`, numbered from `first_log`. `make_server` starts a process, here or elsewhere.
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
    async def seat(self) -> AsyncIterator[Seat]:
        """Provide a process for one attempt as soon as one is free, with its environment imported.

        Raises ConfigError if the environment cannot be imported there, PeerLostError if the process does not start.
        """
        async with self._processes.place() as place:
            await place.ready()
            yield Seat(place)

    def close(self) -> None:
        """Kill the processes. Calling it again does nothing."""
        self._processes.close()


class Seat:
    """Place in a process for one attempt, which may begin several times."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    def num_killed(self) -> int:
        """Number of environment processes lost during this attempt, killed by megarl or ended by themselves."""
        return self._place.num_killed

    def environment(self) -> SeatedEnvironment:
        """Return the environment of an attempt in this process."""
        return SeatedEnvironment(self._place)


class SeatedEnvironment:
    """Environment running in another process.

    Its methods raise RaisedError for errors of the environment, EnvironmentUnavailableError, and
    EnvironmentProcessError if the process is gone. If cancelled, they kill the process.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    async def reset(self, problem: Problem, seed: int) -> Start:
        await self._place.ready()  # A retried attempt may need a new process.
        value = await self._request({"do": "reset", "problem": asdict(problem), "seed": seed})
        return Start(tuple(value["messages"]), tuple(value["tools"]))

    async def step(self, turn: Turn) -> Step:
        value = await self._request({"do": "step", "turn": asdict(turn)})
        return Step(**{**value, "messages": tuple(value["messages"])})

    async def close(self) -> None:
        if self._place.process is not None:
            await self._request({"do": "close"})

    async def _request(self, message: dict[str, Any]) -> Any:
        answer = await self._place.request(message)
        if answer.get("is_last"):
            self._place.kill()
        if how := answer.get("ended") or answer.get("violation"):
            raise EnvironmentProcessError(f"the environment's process {how}")
        if "lost" in answer:
            raise EnvironmentUnavailableError(f"the environment's process {answer['lost']}")
        if "unavailable" in answer:
            raise EnvironmentUnavailableError(str(answer["unavailable"]))
        if "invalid" in answer:
            raise RaisedError(f"TypeError: the message to the environment is not valid JSON: {answer['invalid']}")
        if "error" in answer:
            raise RaisedError(str(answer["error"]))
        return answer.get("value")


def process_settings(environment: str, settings: Mapping[str, Any], memory_gib: float) -> ServerSettings:
    """Return settings for processes in the current folder with this process's import paths.

    `settings` are constructor arguments of the environment, from `rollout.environment_kwargs`.
    """
    folder = os.getcwd()
    return ServerSettings(
        "megarl.environments.environment_main:start",
        environment,
        "rollout.environment",
        {"environment": environment, "settings": dict(settings)},
        # An empty entry of sys.path means the current folder, so name it explicitly.
        tuple(entry or folder for entry in sys.path),
        folder,
        int(memory_gib * (1 << 30)),
    )
