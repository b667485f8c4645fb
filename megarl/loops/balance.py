"""Which of trainer and engines holds the other back, where each has ranks of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

METRICS = {
    "time/rollout_waited_seconds": (
        "seconds",
        "of the rollout, how long the trainer waited for groups, where engines are separate",
    ),
    "rollout/balanced_ranks": (
        "ranks",
        "of the run's ranks those that should be the engines', for both sides to take as long, by the newest steps",
    ),
}
"""Names, units and meanings, for `tracking.table`."""

WINDOW = 5
"""Steps that a judgement is of, at most."""
FEWEST = 3
"""Steps before the first judgement; the run's first, which carries what is only done once, is none of them."""
MARGIN = 0.1
"""Difference of the two idle shares beyond which one side is the bottleneck."""


class Balance:
    """Judges after each step who waited for whom, and tells it when it is first known and when it changes.

    `takes_turns`: neither works while the other does, so both wait whatever their ranks.
    """

    def __init__(
        self, num_trainers: int, num_engines: int, tell: Callable[[str], object], *, takes_turns: bool = False
    ) -> None:
        self._num_trainers, self._num_engines = num_trainers, num_engines
        self._tell, self._takes_turns = tell, takes_turns
        self._idle: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._is_first = True
        self._told = ""

    def of_step(self, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        """METRICS of a step, from its times so far and the engines' `time/engines_idle`."""
        whole, waited = seconds["time/step_seconds"], seconds.get("time/rollout_seconds", 0.0)
        idle = min(1.0, waited / max(whole, 1e-9))
        found = {"time/rollout_waited_seconds": waited}
        if self._is_first:
            self._is_first = False
            return found
        self._idle.append((idle, metrics["time/engines_idle"]))
        if len(self._idle) < FEWEST:
            return found
        trainer, engines = (sum(shares) / len(self._idle) for shares in zip(*self._idle, strict=True))
        ranks = self._balanced_ranks(trainer, engines)
        self._judge(trainer, engines, ranks)
        return found | {"rollout/balanced_ranks": ranks}

    def _balanced_ranks(self, trainer_idle: float, engines_idle: float) -> float:
        """The engines' ranks with which both sides would be busy alike, if work parts evenly over ranks."""
        training, sampling = (1 - trainer_idle) * self._num_trainers, (1 - engines_idle) * self._num_engines
        return (self._num_trainers + self._num_engines) * sampling / max(training + sampling, 1e-9)

    def _judge(self, trainer_idle: float, engines_idle: float, ranks: float) -> None:
        difference = trainer_idle - engines_idle
        slow = "engines" if difference > MARGIN else "trainer" if difference < -MARGIN else "neither"
        if slow == self._told:
            return
        self._told = slow
        whole = self._num_trainers + self._num_engines
        side = "neither side is the bottleneck" if slow == "neither" else f"the bottleneck is the {slow}"
        turns = "; under rollout.max_staleness = 0 one waits while the other works" if self._takes_turns else ""
        self._tell(
            f"{side}: over {len(self._idle)} steps the trainer waited for samples {trainer_idle:.0%} of the time, the "
            f"engines were idle {engines_idle:.0%}{turns}. Of {whole} ranks about {ranks:.1f} for the engines would "
            f"balance them (rollout.ranks, now {self._num_engines})"
        )
