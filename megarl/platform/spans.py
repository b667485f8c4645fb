"""Time spans of this process, recorded while a step is profiled: name, start and end of a block of code.

Times are in seconds of `time.monotonic`, a clock that all processes of a machine share. A recorded span costs about a
microsecond, and a fraction of it without recording.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Span = tuple[str, float, float]

_NUM_MEASURED = 2_000
"""Number of spans recorded to measure the mean cost of a span. Recording them takes about 2 ms."""
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
    """Context whose duration is recorded under `name`, if recording is on. Ignored in all threads except the main
    one.
    """
    # Spans of one thread always nest; spans of several threads would overlap in the profile.
    is_recorded = _recorded is not None and threading.current_thread() is threading.main_thread()
    return _Recorded(name) if is_recorded else _NOT_RECORDED


def seconds_of_a_span() -> float:
    """Measure and return the mean cost, in seconds, of recording one span. Recording must be off before the call."""
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
