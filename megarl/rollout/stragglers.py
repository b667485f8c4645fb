"""Detection of engine replicas that sample far slower than the others (stragglers)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from megarl.tracking.metric_rows import MetricRow

METRICS = (
    MetricRow(
        "rollout/slow_replicas",
        "count",
        "engine replicas with far fewer tokens per second than the others, in total and per request, over the last "
        "steps",
    ),
)

WINDOW = 5
"""Number of most recent steps for measuring a replica's speed."""
MIN_STEPS = 3
"""Measured steps required to call a replica slow. Its first step, with one-time work, is not measured."""
MIN_SECONDS = 10.0
"""Seconds of sampling required to call a replica slow."""
SLOW_SHARE = 0.5
"""A replica is slow if its speed is below this fraction of the median of the others."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """A replica's sampled tokens, its seconds of sampling, and the sum of these seconds over running requests."""

    num_tokens: int = 0
    seconds: float = 0.0
    request_seconds: float = 0.0

    def add(self, pace: Pace) -> None:
        self.num_tokens += pace.num_tokens
        self.seconds += pace.seconds
        self.request_seconds += pace.request_seconds

    @property
    def rate(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)

    @property
    def request_rate(self) -> float:
        return self.num_tokens / max(self.request_seconds, 1e-9)


class StragglerDetector:
    """Finds slow replicas after each step, by name. Reports each one once, with its speed.

    With few requests, even a fast replica has a low total speed. With many requests, it has a low speed per request. So
    both must be low.
    """

    def __init__(self, notify: Callable[[str], object], min_seconds: float = MIN_SECONDS) -> None:
        self._notify, self._min_seconds = notify, min_seconds
        self._paces: dict[str, deque[Pace]] = {}
        self._reported: set[str] = set()

    def forget(self, name: str) -> None:
        """Forget the speed of a lost replica, so its replacement is measured anew."""
        self._paces.pop(name, None)
        self._reported.discard(name)

    def metrics(self, paces: Mapping[str, Pace]) -> dict[str, float]:
        """Return a step's metrics (METRICS) from the speeds of the live replicas, by name."""
        for name, pace in paces.items():
            # Skip a replica's first step: it includes one-time work, such as compiling kernels.
            if name not in self._paces:
                self._paces[name] = deque(maxlen=WINDOW)
            else:
                self._paces[name].append(pace)
        full_windows = {name: total for name in paces if (total := self._sum_over_window(name)) is not None}
        stragglers = [name for name in full_windows if self._is_straggler(name, full_windows)]
        return {"rollout/slow_replicas": float(len(stragglers))}

    def _sum_over_window(self, name: str) -> Pace | None:
        """Return a replica's speed over the last steps; None if it was measured for too short a time."""
        total = Pace()
        for pace in self._paces[name]:
            total.add(pace)
        is_enough = len(self._paces[name]) >= MIN_STEPS and total.seconds >= self._min_seconds
        return total if is_enough else None

    def _is_straggler(self, name: str, paces: Mapping[str, Pace]) -> bool:
        """Return whether a replica is far slower than the median of the others, and report it once."""
        other_paces = [pace for peer, pace in paces.items() if peer != name]
        if not other_paces:
            return False
        # The median, so that a second slow replica does not hide this one.
        replica_pace, median_rate = paces[name], median(pace.rate for pace in other_paces)
        median_request_rate = median(pace.request_rate for pace in other_paces)
        if (
            replica_pace.rate >= SLOW_SHARE * median_rate
            or replica_pace.request_rate >= SLOW_SHARE * median_request_rate
        ):
            return False
        if name not in self._reported:
            self._reported.add(name)
            self._notify(
                f"{name} is slow: over {len(self._paces[name])} steps it sampled {replica_pace.rate:.3g} tokens/s, "
                f"{replica_pace.request_rate:.3g} for each request; the median of its siblings is {median_rate:.3g} "
                f"and {median_request_rate:.3g} (rollout/slow_replicas counts such replicas)"
            )
        return True
