"""Bottleneck detection for separate engines: find out whether the trainer or the engines slow the run down."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

METRICS = {
    "time/rollout_waited_seconds": (
        "seconds",
        "part of the rollout during which the trainer waited for groups, with separate engines",
    ),
    "rollout/balanced_ranks": (
        "ranks",
        "number of the run's ranks to give the engines so that both sides take equally long, estimated from "
        "recent steps",
    ),
}
"""Metrics reported by this module: unit and meaning by metric name. `megarl metrics` lists them."""

WINDOW = 5
"""Maximum number of recent steps averaged for one verdict."""
FEWEST = 3
"""Number of steps needed before the first verdict. A run's first step never counts, because it includes one-time
work.
"""
MARGIN = 0.1
"""The trainer or the engines are the bottleneck if the other side's idle share is larger by more than this."""


class Balance:
    """Finds out after each step which side, trainer or engines, slows the run down.

    It reports the first verdict and every change of it. `takes_turns`: trainer and engines never work at the same time,
    so both are idle part of the time with any number of ranks.
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
        """Return the METRICS of a step, from its times so far (`seconds` by name) and the engines'
        `time/engines_idle`.
        """
        whole, waited = seconds["time/step_seconds"], seconds.get("time/rollout_seconds", 0.0)
        idle = min(1.0, waited / max(whole, 1e-9))
        found = {"time/rollout_waited_seconds": waited}
        # The first step includes work done only once, so its shares would mislead.
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
        """Return the number of engine ranks that gives both sides equal load, if work divides evenly over ranks."""
        training, sampling = (1 - trainer_idle) * self._num_trainers, (1 - engines_idle) * self._num_engines
        # The bound avoids 0 / 0 if both sides were idle throughout.
        return (self._num_trainers + self._num_engines) * sampling / max(training + sampling, 1e-9)

    def _judge(self, trainer_idle: float, engines_idle: float, ranks: float) -> None:
        difference = trainer_idle - engines_idle
        slow = "engines" if difference > MARGIN else "trainer" if difference < -MARGIN else "neither"
        # Report changes only: a verdict repeated at each step would fill the log.
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
