"""Spans of time of this process, recorded while a step is profiled: name, start, end.

Times are those of `time.monotonic`, in seconds; all processes of a machine share it. A span that is recorded costs
about a microsecond, one that is not a fraction of it.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Span = tuple[str, float, float]

_NUM_MEASURED = 2_000
_recorded: list[Span] | None = None
_NOT_RECORDED: AbstractContextManager[None] = nullcontext()


class _Recorded:
    __slots__ = ("_began", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *raised: Any) -> None:
        if _recorded is not None:
            _recorded.append((self._name, self._began, time.monotonic()))


def span(name: str) -> AbstractContextManager[None]:
    """Record the time of the block, if spans are recorded. Only the main thread's, so that they nest."""
    is_recorded = _recorded is not None and threading.current_thread() is threading.main_thread()
    return _Recorded(name) if is_recorded else _NOT_RECORDED


def seconds_of_a_span() -> float:
    """Time that recording a span takes here and now, mean of many; nothing may be recorded meanwhile."""
    record(True)
    began = time.monotonic()
    for _ in range(_NUM_MEASURED):
        with span("measured"):
            pass
    ended = time.monotonic()
    record(False)
    return (ended - began) / _NUM_MEASURED


def record(is_on: bool) -> list[Span]:
    """Record from now on, or no longer. Returns the spans that ended since recording began, in that order."""
    global _recorded
    taken = _recorded or []
    _recorded = [] if is_on else None
    return taken
