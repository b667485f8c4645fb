"""Busy time and peak memory of a rank's calls."""

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
    "store_targets": "train",
    "update": "train",
    "reshard": "reshard",
    "start_reshard": "reshard",
    "save_checkpoint": "checkpoint",
    "export": "export",
}
"""Phase of a step, by method of a call."""


def phase_of_method(method: str) -> str | None:
    """Return the phase of a step that a call belongs to, or None. `policy.update` counts as `update`."""
    return _PHASES.get(method.rpartition(".")[2])


@dataclass(slots=True)
class Activity:
    """Busy seconds and peak memory of a rank's calls since the last `take`."""

    busy_seconds: float = 0.0
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Peak bytes by method, from the end of the previous call to the end of this one. So a reshard includes neither the
    memory of the update before nor the KV cache of the rollout after.
    """

    @contextmanager
    def record_call(self, method: str) -> Iterator[None]:
        """Context of a call. Records its duration and peak memory if it succeeds."""
        # No try/finally: after a fault the device must not be queried, so a failed call is not recorded.
        began = time.monotonic()
        yield
        self.busy_seconds += time.monotonic() - began
        if (peak := peak_memory.take_peak_bytes()) is not None:
            self.peak_bytes[method] = max(self.peak_bytes.get(method, 0), peak)

    def take(self) -> Activity:
        snapshot = Activity(self.busy_seconds, self.peak_bytes)
        self.busy_seconds, self.peak_bytes = 0.0, {}
        return snapshot
