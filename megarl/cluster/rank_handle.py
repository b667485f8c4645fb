"""The driver's end of one rank: its connection, its log, and how its process ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.cluster.messages import HEAD
from megarl.terminal import printable

_REPORT_GRACE_SECONDS = 1.0
_LOG_TAIL_LINES = 60
_NOISE = re.compile(
    r"^(?:"
    r"\S+\.py:\d+: \w*Warning: .*\n(?:  .*\n)?"  # Python's warnings, and the line of code below
    r"|(?:\(\w+ pid=\d+\) )?(?:DEBUG|INFO|WARNING) \d\d-\d\d .*\n"  # vLLM's logger
    r"|\[Gloo\] .*\n"
    r"|\[[WI]\d.*\.(?:cpp|h|cu):\d+\] .*\n"  # torch's logger
    r")",
    re.MULTILINE,
)
"""Lines of other libraries in a rank's log that do not help to explain its end."""


class RankError(Exception):
    """The error that a rank reported; `echo`: a mere consequence of another rank's leaving a collective."""

    def __init__(
        self, handle: RankHandle, at: float, *, echo: bool = False, report: Mapping[str, Any] | None = None
    ) -> None:
        self.handle, self.at, self.echo, self.report = handle, at, echo, report


def log_tail(log: Path) -> str:
    """The last lines of a rank's log, without other libraries' notices."""
    if not log.exists():
        return f"{log} was not written."
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        text = _NOISE.sub("", file.read().decode(errors="replace"))
    lines = printable(text).splitlines()[-_LOG_TAIL_LINES:]
    return "\n".join([f"The end of {log}:", *lines]) if lines else f"{log} tells nothing."


def log_size(log: Path) -> int:
    """Size of a log in bytes; 0 if it does not exist."""
    return log.stat().st_size if log.exists() else 0


def log_since(log: Path, start: int) -> str:
    """The text of a log from byte `start` on."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


class RankHandle(ABC):
    """The driver's end of one rank: its connection and log. `died` is done when its process is known to have ended.

    `asked` is the signal to stop that the rank received, if any.
    """

    socket: socket.socket
    asked: str | None = None

    def __init__(self, rank: int, log: Path) -> None:
        self.rank, self.log = rank, log
        self.died: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._sending = asyncio.Lock()

    async def ask(self, message: bytes) -> Any:
        """Send one command and return the rank's answer.

        Raises `RankError` if the method raised or the process is gone.
        """
        try:
            await self._send(message)
            (size,) = HEAD.unpack(await self._read(HEAD.size))
            answer = await self._read(size)
        except (OSError, EOFError):
            raise await self.lost() from None
        return self.content(answer)

    async def notify(self, notice: bytes) -> None:
        """Send a message that the rank takes at once, also in a call, and does not answer; a dead one gets none."""
        with contextlib.suppress(OSError):
            await self._send(notice)

    def content(self, answer: bytearray | memoryview) -> Any:
        """The result of the rank's method. Raises `RankError` if it raised."""
        answered, content, self.asked = pickle.loads(answer)
        if not answered:
            raise RankError(self, content["time"], echo=content["echo"], report=content)
        return content

    async def lost(self) -> RankError:
        """The error of a rank that is gone, after a moment in which the end of its process may become known."""
        noticed = time.time()
        await asyncio.wait([self.died], timeout=_REPORT_GRACE_SECONDS)
        return RankError(self, self._lost_at(noticed))

    def _lost_at(self, noticed: float) -> float:
        """When a rank was lost whose connection was seen to end at `noticed`."""
        return self.died.result() if self.died.done() else noticed

    @property
    def is_cut_off(self) -> bool:
        """Whether the connection ended between driver and rank, while nothing is known of the rank's own end."""
        return False

    def dismiss(self) -> None:
        """Tell the rank, by the end of its stream, to leave."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    async def _send(self, message: bytes) -> None:
        async with self._sending:  # a long message is sent in parts
            await asyncio.get_running_loop().sock_sendall(self.socket, message)

    async def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            received = await asyncio.get_running_loop().sock_recv_into(self.socket, rest)
            if not received:
                raise EOFError
            rest = rest[received:]
        return data

    @abstractmethod
    def kill(self) -> None:
        """Kill the rank and its children, if it is still running."""

    def release(self) -> None:
        """Close the connection."""
        self.socket.close()

    @abstractmethod
    def exit_reason(self, is_dead: bool) -> str:
        """How the rank ended, in words that follow its name; `is_dead`: its process ended by itself."""

    def log_tail(self) -> str:
        return log_tail(self.log)


Answers = dict[RankHandle, asyncio.Future[Any]]
"""The answers of ranks to a command, as they come."""
