"""The activity of a rank: which of the driver's calls it carried out when, and how much memory they took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megarl.platform import memory


@dataclass(slots=True)
class Activity:
    """The calls of a rank since they were last taken."""

    busy_seconds: float = 0.0
    """How long it carried out calls, of whatever kind."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """The most memory that was in use by the end of a call, since the end of the call before, by method."""

    @contextmanager
    def during(self, method: str) -> Iterator[None]:
        """Note a call that ends well: after a fault the device may not be asked anything."""
        began = time.monotonic()
        yield
        self.busy_seconds += time.monotonic() - began
        if (peak := memory.take_peak_bytes()) is not None:
            self.peak_bytes[method] = max(self.peak_bytes.get(method, 0), peak)

    def take(self) -> Activity:
        """The activity so far, which is then forgotten."""
        taken = Activity(self.busy_seconds, self.peak_bytes)
        self.busy_seconds, self.peak_bytes = 0.0, {}
        return taken
