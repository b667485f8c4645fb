"""Time limits of the driver's calls, by method (recipe field `cluster.verb_timeout_seconds`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from megarl.config import ClusterConfig

_NUM_FIRST = 3
"""Number of a method's first calls that its time limit ignores: they are slow, because they compile and connect."""
_TIMES_SLOWEST = 10.0
"""Limit of later calls, as a multiple of the method's slowest call."""


_TIMES_LATE = 3.0
"""A call is reported as late after this multiple of its method's slowest call."""
_LEAST_LATE_SECONDS = 5.0
"""Minimum seconds until a call is late: short calls vary with the machine's load."""


class Limit(NamedTuple):
    """A time limit, and the recipe field that raises it (empty: none)."""

    seconds: float
    field: str = ""


class Deadlines:
    """Time limits of calls by method.

    A method without a limit in `limit_by_method` has `longest` seconds for its first `_NUM_FIRST` calls. Later calls
    have `_TIMES_SLOWEST` times the slowest call, at least `shortest` and at most `longest`.
    """

    def __init__(self, shortest: Limit, longest: Limit, limit_by_method: Mapping[str, Limit] | None = None) -> None:
        self._shortest, self._longest = shortest, max(shortest, longest)
        self._limit_by_method = dict(limit_by_method or {})
        self._num_calls: dict[str, int] = {}
        self._slowest: dict[str, float] = {}

    @classmethod
    def for_all_methods(cls, seconds: float, field: str = "") -> Deadlines:
        return cls(Limit(seconds, field), Limit(seconds, field))

    @property
    def shortest(self) -> Limit:
        return self._shortest

    def limit_for(self, method: str) -> Limit:
        if method in self._limit_by_method:
            return self._limit_by_method[method]
        # The first calls are slow, because they compile and connect.
        if self._num_calls.get(method, 0) < _NUM_FIRST:
            return self._longest
        measured_limit = Limit(_TIMES_SLOWEST * self._slowest[method], self._shortest.field)
        return min(max(self._shortest, measured_limit), self._longest)

    def seconds_until_late(self, method: str) -> float:
        """Return the seconds until a method's next call is late; infinity while unknown."""
        if self._num_calls.get(method, 0) < _NUM_FIRST:
            return math.inf
        return max(_LEAST_LATE_SECONDS, _TIMES_LATE * self._slowest[method])

    def record_duration(self, method: str, seconds: float) -> None:
        self._num_calls[method] = self._num_calls.get(method, 0) + 1
        self._slowest[method] = max(seconds, self._slowest.get(method, 0.0))


def run_deadlines(cluster: ClusterConfig) -> Deadlines:
    """Return the deadlines of a run's calls: of building models, of checkpoints, and of all other methods."""
    build_limit = Limit(cluster.build_timeout_seconds, "cluster.build_timeout_seconds")
    checkpoint_limit = Limit(cluster.checkpoint_timeout_seconds, "cluster.checkpoint_timeout_seconds")
    checkpoint_limits = dict.fromkeys(
        (
            "save_checkpoint",
            "finish_checkpoint",
            "load_checkpoint",
            "replayed_experts.load",
            "rollbacks.roll_back",
            "export",
        ),
        checkpoint_limit,
    )
    return Deadlines(
        Limit(cluster.verb_timeout_seconds, "cluster.verb_timeout_seconds"),
        Limit(cluster.collective_timeout_seconds, "cluster.collective_timeout_seconds"),
        {"__init__": build_limit, **checkpoint_limits},
    )
