"""The driver's handle of a rank process: its log, its answers, and how it ended."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.cluster.ranks.stacks import name_ranks
from megarl.terminal import printable

_LOG_TAIL_LINES = 60
"""Log lines quoted in an error."""
_NOISE = re.compile(
    r"^(?:"
    r"\S+\.py:\d+: \w*Warning: .*\n(?:  .*\n)?"  # Python's warnings, and the line of code below
    r"|(?:\(\w+ pid=\d+\) )?(?:DEBUG|INFO|WARNING) \d\d-\d\d .*\n"  # vLLM's logger
    r"|\[Gloo\] .*\n"
    r"|\[[WI]\d.*\.(?:cpp|h|cu):\d+\] .*\n"  # torch's logger
    r")",
    re.MULTILINE,
)
"""Log lines of other libraries that do not explain a failure."""

_process_numbers = itertools.count(1)
"""Process numbers, unique in this driver, so a late answer never counts for a newer process."""


class RankError(Exception):
    """Raised for an error that a rank reported, or for a lost rank (`report` None).

    `epoch_seconds` is its time since 1970. `echo`: it only reflects that another rank left a collective.
    """

    def __init__(
        self, handle: RankHandle, epoch_seconds: float, *, echo: bool = False, report: Mapping[str, Any] | None = None
    ) -> None:
        self.handle, self.epoch_seconds, self.echo, self.report = handle, epoch_seconds, echo, report


def log_tail(log: Path) -> str:
    """Return the last lines of a log, without notices of other libraries."""
    if not log.exists():
        return f"{log} was not written."
    with log.open("rb") as file:
        # Logs can be large, so only the last 64 KiB are read.
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        text = _NOISE.sub("", file.read().decode(errors="replace"))
    lines = printable(text).splitlines()[-_LOG_TAIL_LINES:]
    return "\n".join([f"The end of {log}:", *lines]) if lines else f"{log} has no messages."


class RankHandle:
    """The driver's handle of one rank process.

    `process` is its agent's number for it. `died` completes at the end of the process with the time, in seconds since
    1970. `stop_signal` is the name of a stop signal to the rank.
    """

    stop_signal: str | None = None

    def __init__(self, rank: int, log: Path) -> None:
        """Create the handle of the run's rank `rank`, before its agent forks it."""
        self.rank, self.log = rank, log
        self.process = next(_process_numbers)
        self.died: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.end: str | None = None
        """How the process ended, as a verb phrase; None: it runs."""
        self.is_cut_off = False
        """Whether only the connection to the agent ended. The process dies with its agent."""

    def decode_answer(self, answer: memoryview) -> Any:
        """Decode a rank's answer and return the result. Raises RankError if the method raised."""
        has_result, content, self.stop_signal = pickle.loads(answer)
        if not has_result:
            raise RankError(self, content["time"], echo=content["echo"], report=content)
        return content

    def record_end(self, end_text: str, epoch_seconds: float, *, is_cut_off: bool = False) -> None:
        """Record the end of the process, once, `epoch_seconds` after 1970."""
        if not self.died.done():
            self.end, self.is_cut_off = end_text, is_cut_off
            self.died.set_result(epoch_seconds)

    def loss_error(self) -> RankError:
        return RankError(self, self.died.result())

    def log_tail(self) -> str:
        return log_tail(self.log)


def name_handles(handles: Sequence[RankHandle]) -> str:
    """Return these ranks as text, for example `ranks 0-2, 5`."""
    return name_ranks([handle.rank for handle in handles])


Answers = dict[RankHandle, asyncio.Future[Any]]
"""Future answers to a command by rank."""
