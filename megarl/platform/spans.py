"""Time spans of this process, recorded while a step is profiled: name, start and end of a block of code.

Times are in seconds of `time.monotonic`, a clock shared by all processes of a machine. Recording a span costs about a
microsecond, an unrecorded span a fraction of that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Span = tuple[str, float, float]

_NUM_MEASURED = 2_000
"""Number of spans recorded to measure a span's mean cost. It takes about 2 ms."""
_recorded: list[Span] | None = None
_annotate: Callable[[str], AbstractContextManager[None]] | None = None
"""Opens a named range in another profiler's trace; None: no other profiler runs."""
_NOT_RECORDED: AbstractContextManager[None] = nullcontext()


class _RecordedSpan:
    __slots__ = ("_began", "_name", "_range")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._range = annotation(self._name)
        self._range.__enter__()
        self._began = time.monotonic()

    def __exit__(self, *raised: Any) -> None:
        if _recorded is not None:
            _recorded.append((self._name, self._began, time.monotonic()))
        self._range.__exit__(*raised)


def span(name: str) -> AbstractContextManager[None]:
    """Record the duration of this context under `name`, if recording is on and this is the main thread."""
    # Main thread only: spans of one thread always nest, but those of several threads would overlap in the profile.
    is_on = _recorded is not None or _annotate is not None
    return _RecordedSpan(name) if is_on and threading.current_thread() is threading.main_thread() else _NOT_RECORDED


def annotation(name: str) -> AbstractContextManager[None]:
    """Open a named range in another profiler's trace, if one runs (`annotate_with`). Not recorded here."""
    return _NOT_RECORDED if _annotate is None else _annotate(name)


def annotate_with(annotate: Callable[[str], AbstractContextManager[None]] | None) -> None:
    """From now on, open a range of another profiler for each span, by `annotate(name)`; None: stop this."""
    global _annotate
    _annotate = annotate


def measure_span_seconds() -> float:
    """Measure the mean seconds of recording one span. Recording must be off."""
    record(True)
    began = time.monotonic()
    for _ in range(_NUM_MEASURED):
        with span("measured"):
            pass
    ended = time.monotonic()
    record(False)
    return (ended - began) / _NUM_MEASURED


def record(is_on: bool) -> list[Span]:
    """Turn recording on or off. Returns the spans ended since the last call, in the order of their ends."""
    global _recorded
    ended_spans = _recorded or []
    _recorded = [] if is_on else None
    return ended_spans
