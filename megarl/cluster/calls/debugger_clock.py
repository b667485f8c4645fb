"""Clock of calls to ranks. It stands still while a debugger pauses ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOOK_SECONDS = 0.1
"""Interval of looks whether a debugger still pauses ranks."""


class DebuggerClock:
    """Clock in seconds for the deadlines of calls. The groups of a run share one.

    A hang report reads native stacks with a debugger, which pauses ranks of any group. These ranks are neither late nor
    lost.
    """

    def __init__(self) -> None:
        self._num_debuggers = 0
        self._stopped_since = 0.0
        """Monotonic seconds at which the first of the present debuggers began."""
        self._seconds_stopped = 0.0
        """Total seconds of earlier stops."""

    @property
    def is_stopped(self) -> bool:
        """Whether a debugger pauses ranks now."""
        return self._num_debuggers > 0

    @property
    def seconds_stopped(self) -> float:
        """Total seconds so far in which debuggers paused ranks."""
        return self._seconds_stopped + (time.monotonic() - self._stopped_since if self.is_stopped else 0.0)

    def now(self) -> float:
        """Return monotonic seconds, without those in which debuggers paused ranks."""
        return time.monotonic() - self.seconds_stopped

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context in which a debugger may pause ranks. Several may overlap."""
        if not self._num_debuggers:
            self._stopped_since = time.monotonic()
        self._num_debuggers += 1
        try:
            yield
        finally:
            self._num_debuggers -= 1
            if not self._num_debuggers:
                self._seconds_stopped += time.monotonic() - self._stopped_since

    async def wait_while_stopped(self) -> None:
        """Wait until no debugger pauses ranks."""
        while self.is_stopped:
            await asyncio.sleep(_LOOK_SECONDS)
