"""Time spans of this process, recorded while a step is profiled: name, start, end.

Times are in seconds of `time.monotonic`, a clock shared by all processes of a machine. A recorded span costs about a
microsecond. Without recording it costs a fraction of it.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Span = tuple[str, float, float]

_NUM_MEASURED = 2_000
"""Spans recorded by `seconds_of_a_span`; about 2 ms in total."""
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
    """Record the time of the block, if recording is on. Ignored in all threads except the main one."""
    # Spans of one thread always nest; spans of several threads would overlap in the profile.
    is_recorded = _recorded is not None and threading.current_thread() is threading.main_thread()
    return _Recorded(name) if is_recorded else _NOT_RECORDED


def seconds_of_a_span() -> float:
    """Return the mean seconds for recording one span, measured now. Recording must be off before the call."""
    record(True)
    began = time.monotonic()
    for _ in range(_NUM_MEASURED):
        with span("measured"):
            pass
    ended = time.monotonic()
    record(False)
    return (ended - began) / _NUM_MEASURED


def record(is_on: bool) -> list[Span]:
    """Turn recording on or off. Return the spans ended since the last call, in the order of their ends."""
    global _recorded
    taken = _recorded or []
    _recorded = [] if is_on else None
    return taken
