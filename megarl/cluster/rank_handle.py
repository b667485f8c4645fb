"""The driver's view of one rank process: connections, log, and how the process ended."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import socket as Socket  # noqa: N812
from typing import Any, Protocol

from megarl.cluster.stacks import ranks_named
from megarl.terminal import printable

LOSS_GRACE_SECONDS = 1.0
"""Seconds, after a connection ended, within which the end of its process becomes known."""
_LOG_TAIL_LINES = 60
"""Number of log lines quoted in an error."""
_NOISE = re.compile(
    r"^(?:"
    r"\S+\.py:\d+: \w*Warning: .*\n(?:  .*\n)?"  # Python's warnings, and the line of code below
    r"|(?:\(\w+ pid=\d+\) )?(?:DEBUG|INFO|WARNING) \d\d-\d\d .*\n"  # vLLM's logger
    r"|\[Gloo\] .*\n"
    r"|\[[WI]\d.*\.(?:cpp|h|cu):\d+\] .*\n"  # torch's logger
    r")",
    re.MULTILINE,
)
"""Regular expression of log lines of other libraries that do not help to explain a failure."""


class RankError(Exception):
    """Raised for an error reported by a rank, or for a lost rank (`report` None).

    `at` is the time in seconds since 1970. `echo` is True if the error is a mere consequence, because another rank left
    a collective.
    """

    def __init__(
        self, handle: RankHandle, at: float, *, echo: bool = False, report: Mapping[str, Any] | None = None
    ) -> None:
        self.handle, self.at, self.echo, self.report = handle, at, echo, report


def log_tail(log: Path) -> str:
    """Return the last lines of a rank's log, without notices of other libraries."""
    if not log.exists():
        return f"{log} was not written."
    with log.open("rb") as file:
        # Logs can be large, so only the last 64 KiB are read.
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        text = _NOISE.sub("", file.read().decode(errors="replace"))
    lines = printable(text).splitlines()[-_LOG_TAIL_LINES:]
    return "\n".join([f"The end of {log}:", *lines]) if lines else f"{log} has no messages."


def log_size(log: Path) -> int:
    """Return the size of a log in bytes; 0 if it does not exist."""
    return log.stat().st_size if log.exists() else 0


def log_since(log: Path, start: int) -> str:
    """Return the text of a log from byte `start` on."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


class RankConnection(Protocol):
    """Protocol of a connection to a rank; `connection.Connection` implements it."""

    socket: Socket
    is_relay: bool
    is_lost: bool
    cut_off: set[RankHandle]

    async def open(self) -> None: ...

    def ask(self, messages: Mapping[RankHandle, bytes], answers: Answers) -> asyncio.Future[None]: ...

    def abandon(self, handle: RankHandle) -> None: ...

    def send(self, *parts: bytes) -> None: ...

    def dismiss(self) -> None: ...

    def cut(self) -> None: ...

    def release(self) -> None: ...


class RankHandle(ABC):
    """The driver's view of one rank process: its connections and log.

    `direct` is the connection to the rank itself. `connection` carries the commands; it leads to the relay of the
    rank's node, if there is one. `died` completes with the time at which the end of the process became known.
    `stop_signal` is the name of the stop signal received by the rank, if any. `place` is the place of the process on
    the run's nodes (see `places`); unlike the rank it never changes.
    """

    direct: RankConnection
    connection: RankConnection
    stop_signal: str | None = None
    place: int

    def __init__(self, rank: int, log: Path) -> None:
        self.rank, self.log = rank, log
        self.died: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def content(self, answer: memoryview) -> Any:
        """Decode a rank's answer and return the method's result. Raises RankError if the method raised."""
        answered, content, self.stop_signal = pickle.loads(answer)
        if not answered:
            raise RankError(self, content["time"], echo=content["echo"], report=content)
        return content

    async def lost(self) -> RankError:
        """Return the error of a lost rank. Waits a moment first, because how the process ended may become known."""
        noticed = time.time()
        await asyncio.wait([self.died], timeout=LOSS_GRACE_SECONDS)
        return RankError(self, self._lost_at(noticed))

    def _lost_at(self, noticed: float) -> float:
        """Return the time, in seconds since 1970, at which a rank was lost. `noticed` is the time at which its
        connection ended."""
        return self.died.result() if self.died.done() else noticed

    @property
    def is_cut_off(self) -> bool:
        """Whether the connection to the rank ended while the rank's process, as far as known, still runs."""
        return False

    @abstractmethod
    def kill(self) -> None:
        """Kill the rank process and its children, if it still runs."""

    def release(self) -> None:
        """Close the connections to the rank."""
        self.direct.release()
        self.connection.release()

    @abstractmethod
    def exit_reason(self, is_dead: bool) -> str:
        """Return how the rank ended, as words following its name.

        `is_dead` is True if the process ended by itself.
        """

    def obstacle(self) -> str:
        """Return what keeps the rank's process from its start, for a message; empty if nothing is known."""
        return ""

    def thread_states(self) -> str:
        """Return the state of the rank's threads in the kernel. It is empty if the rank is not on the driver's machine:
        `native_stacks` includes it then.
        """
        return ""

    def native_stacks(self, seconds: float) -> str:
        """Return the native stacks of the rank's threads, or why there are none. Blocks, for `seconds` at most."""
        return "no native stacks: this kind of rank has none"

    def log_tail(self) -> str:
        return log_tail(self.log)


def names_of(handles: Sequence[RankHandle]) -> str:
    """Return the ranks of these handles as text, for example `ranks 0-2, 5`."""
    return ranks_named([handle.rank for handle in handles])


Answers = dict[RankHandle, asyncio.Future[Any]]
"""A future per rank for its answer to one command."""
