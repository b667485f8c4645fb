"""Statistics of the calls executed by a rank: busy time and peak memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megarl.platform.memory import peak_memory

_PHASES = {
    "advance": "rollout",
    "forward": "logprobs",
    "forward_with_entropies": "logprobs",
    "teach": "train",
    "update": "train",
    "reshard": "reshard",
    "start_reshard": "reshard",
    "save_checkpoint": "checkpoint",
    "export": "export",
}
"""Phase of a step that a call to the ranks belongs to, by method name."""


def phase_of_method(method: str) -> str | None:
    """Return the phase of a step that a call belongs to; None: no phase. `policy.update` counts as `update`."""
    return _PHASES.get(method.rpartition(".")[2])


@dataclass(slots=True)
class Activity:
    """Statistics of a rank's calls since they were last fetched with `take`."""

    busy_seconds: float = 0.0
    """Seconds spent by the rank in calls."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Peak bytes in use, by method: the maximum from the end of the previous call to the end of a call of the method.
    A reshard counts neither the memory of the update before it nor the KV cache of the rollout after it.
    """

    @contextmanager
    def during(self, method: str) -> Iterator[None]:
        """Context of a call: record its duration and peak memory, if it succeeds."""
        # No try/finally: after a fault the device must not be queried, so a failed call is not recorded.
        began = time.monotonic()
        yield
        self.busy_seconds += time.monotonic() - began
        if (peak := peak_memory.take_peak_bytes()) is not None:
            self.peak_bytes[method] = max(self.peak_bytes.get(method, 0), peak)

    def take(self) -> Activity:
        """Return the statistics recorded so far, and reset them."""
        taken = Activity(self.busy_seconds, self.peak_bytes)
        self.busy_seconds, self.peak_bytes = 0.0, {}
        return taken
