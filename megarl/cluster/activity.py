"""Busy time and peak memory of a rank's calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megarl.platform import peak_memory


@dataclass(slots=True)
class Activity:
    """Statistics of a rank's calls since the last `take`."""

    busy_seconds: float = 0.0
    """Seconds spent in calls of all methods."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Peak memory in use by method, from the end of the previous call to the end of this one."""

    @contextmanager
    def during(self, method: str) -> Iterator[None]:
        """Record the duration and peak memory of a call, if it succeeds."""
        # No try/finally: after a fault the device must not be queried, so a failed call is not recorded.
        began = time.monotonic()
        yield
        self.busy_seconds += time.monotonic() - began
        if (peak := peak_memory.take_peak_bytes()) is not None:
            self.peak_bytes[method] = max(self.peak_bytes.get(method, 0), peak)

    def take(self) -> Activity:
        """Return this rank's busy seconds and peak memory since the last call, and reset them."""
        taken = Activity(self.busy_seconds, self.peak_bytes)
        self.busy_seconds, self.peak_bytes = 0.0, {}
        return taken
