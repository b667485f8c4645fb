"""Driver's side of a process running an environment's attempts one after the other.

Messages are JSON; nothing is unpickled.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.processes.frames import FrameError, UnsendableError, receive, receive_answer, send, within
from megarl.processes.supervised_process import KillableProcess
from megarl.types import ConfigError, PeerLostError

MAX_ANSWER_BYTES = 16 << 20
START_SECONDS = 300.0
"""Time limit for importing an environment."""
_SERVER = "megarl.environments.environment_main:serve"


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Settings of an environment's processes."""

    environment: str
    """Name of the environment in the recipe."""
    settings: Mapping[str, Any]
    """Constructor arguments of the environment, from `rollout.environment_kwargs`."""
    memory_bytes: int
    """Limit of a process's address space, in addition to the imports."""
    search_path: tuple[str, ...]
    """`sys.path` of the process."""
    folder: str
    """Current folder of the process."""


def process_settings(environment: str, settings: Mapping[str, Any], memory_gib: float) -> ProcessSettings:
    """Return settings for processes in the current folder with this process's import paths."""
    folder = os.getcwd()
    # An empty entry of sys.path means the current folder, so name it explicitly.
    search_path = tuple(entry or folder for entry in sys.path)
    return ProcessSettings(environment, settings, int(memory_gib * (1 << 30)), search_path, folder)


class Process(Protocol):
    """Process of an environment, on this node or another."""

    def wait_until_ready(self) -> None:
        """See `EnvironmentProcess.wait_until_ready`."""
        ...

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """See `EnvironmentProcess.ask`."""
        ...

    def close(self) -> None:
        """Kill the process."""


MakeProcess = Callable[[ProcessSettings, str | None], Process]
"""Function starting a process for an environment. The text is the path of its output's log."""


class EnvironmentProcess:
    """Process playing attempts one after the other. One thread at a time may ask it, any thread may close it."""

    def __init__(self, settings: ProcessSettings, log_file: str | None = None) -> None:
        """Start the process without waiting for it. Raises PeerLostError if the machine cannot start it."""
        self._name = settings.environment
        self._num_requests = 0
        self._lock = threading.Lock()
        self._ended: str | None = None
        try:
            self._process = KillableProcess(
                _SERVER, search_path=settings.search_path, folder=settings.folder, log_file=log_file
            )
        except OSError as error:
            raise PeerLostError(f"a process for environment {self._name} cannot be started: {error}") from None
        start = {
            "environment": settings.environment,
            "settings": dict(settings.settings),
            "memory_bytes": settings.memory_bytes,
        }
        self._is_ready = False
        with suppress(OSError):  # If it ended already, waiting for its answer fails.
            send(self._process.connection, start)

    def wait_until_ready(self) -> None:
        """Wait until the environment is imported.

        Raises ConfigError if the import fails or takes too long, PeerLostError if the process ends or is closed.
        """
        if self._is_ready:
            return
        try:
            told = receive(self._process.connection, MAX_ANSWER_BYTES, within(START_SECONDS))
        except TimeoutError:
            self.close()
            raise ConfigError(
                f"rollout.environment: importing {self._name} took more than {START_SECONDS:g} s"
            ) from None
        except (EOFError, OSError, FrameError):
            raise PeerLostError(f"the process of environment {self._name} {self._end()} while it started") from None
        if told.get("ready") is not True:
            self.close()
            raise ConfigError(str(told.get("refused")))
        self._is_ready = True

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request (see `server.serve`), or `ended` with the reason, or `lost` for a lost node.

        After the latter two a new process is needed.
        """
        self._num_requests += 1
        try:
            send(self._process.connection, {"id": self._num_requests, **request})
            return receive_answer(self._process.connection, self._num_requests, MAX_ANSWER_BYTES)
        except UnsendableError as error:
            return {"error": f"TypeError: the message to the environment is not valid JSON: {error}"}
        # A process that breaks the protocol cannot be trusted with another request.
        except FrameError as error:
            self.close()
            return {"ended": f"sent {error}"}
        except (EOFError, OSError):
            return {"ended": self._end()}

    def close(self) -> None:
        """Kill the process and all its descendants."""
        with self._lock:
            self._ended = self._ended or self._process.kill()

    def _end(self) -> str:
        """Return how the process ended after it closed its connection."""
        with self._lock:
            self._ended = self._ended or self._process.end()
            return self._ended
