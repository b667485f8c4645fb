"""Engine replicas that are far slower than their siblings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

METRICS = {
    "rollout/slow_replicas": (
        "count",
        "engine replicas whose tokens a second are far below their siblings', in all and for each request, over the "
        "newest steps",
    ),
}
"""Names, units and meanings, for `tracking.table`."""

WINDOW = 5
"""Steps that a judgement is of, at most."""
FEWEST = 3
"""Steps before the first judgement; the first of a replica, which carries what is only done once, is none of them."""
FEWEST_SECONDS = 10.0
"""Seconds of sampling that a judgement is of, at least."""
SHARE = 0.5
"""A replica is slow that has less than this share of its siblings' median."""


@dataclass(slots=True)
class Pace:
    """Tokens that a replica sampled, and how long it took: in seconds, and in seconds of all its requests together."""

    num_tokens: int = 0
    seconds: float = 0.0
    request_seconds: float = 0.0

    def add(self, other: Pace) -> None:
        """Count what another time brought."""
        self.num_tokens += other.num_tokens
        self.seconds += other.seconds
        self.request_seconds += other.request_seconds

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / max(self.seconds, 1e-9)

    @property
    def rate_of_request(self) -> float:
        """Tokens a second of one of the requests that run at a time."""
        return self.num_tokens / max(self.request_seconds, 1e-9)


class SlowReplicas:
    """Judges after each step which replicas are slow, by name; each is told once, with numbers.

    A replica with few requests samples few tokens a second, one with many samples few for each of them: who is slow at
    a like load is behind in both.
    """

    def __init__(self, tell: Callable[[str], object], fewest_seconds: float = FEWEST_SECONDS) -> None:
        self._tell, self._fewest_seconds = tell, fewest_seconds
        self._paces: dict[str, deque[Pace]] = {}
        self._told: set[str] = set()

    def forget(self, name: str) -> None:
        """A replica was lost: who comes back in its name is another one."""
        self._paces.pop(name, None)
        self._told.discard(name)

    def of_step(self, paces: Mapping[str, Pace]) -> dict[str, float]:
        """METRICS of a step, from the paces of the replicas that are there."""
        for name, pace in paces.items():
            if name not in self._paces:
                self._paces[name] = deque(maxlen=WINDOW)
            else:
                self._paces[name].append(pace)
        whole = {name: total for name in paces if (total := self._over_window(name)) is not None}
        slow = [name for name in whole if self._is_slow(name, whole)]
        return {"rollout/slow_replicas": float(len(slow))}

    def _over_window(self, name: str) -> Pace | None:
        """A replica's pace over the newest steps; None while that is too little to judge it by."""
        total = Pace()
        for pace in self._paces[name]:
            total.add(pace)
        is_enough = len(self._paces[name]) >= FEWEST and total.seconds >= self._fewest_seconds
        return total if is_enough else None

    def _is_slow(self, name: str, paces: Mapping[str, Pace]) -> bool:
        others = [pace for other, pace in paces.items() if other != name]
        if not others:
            return False
        own, rate = paces[name], median(pace.rate for pace in others)
        rate_of_request = median(pace.rate_of_request for pace in others)
        if own.rate >= SHARE * rate or own.rate_of_request >= SHARE * rate_of_request:
            return False
        if name not in self._told:
            self._told.add(name)
            self._tell(
                f"{name} is slow: over {len(self._paces[name])} steps it sampled {own.rate:.3g} tokens/s, "
                f"{own.rate_of_request:.3g} for each request; the median of its siblings is {rate:.3g} and "
                f"{rate_of_request:.3g} (rollout/slow_replicas counts such replicas)"
            )
        return True
