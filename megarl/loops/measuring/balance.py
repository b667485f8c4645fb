"""Balance of separate trainers and engines: which side waits for the other, and how many ranks would balance them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from megarl.tracking.metric_rows import MetricRow

METRICS = (
    MetricRow(
        "time/rollout_waited_seconds",
        "seconds",
        "part of the rollout during which the trainer waited for groups",
        condition="rollout.placement=separate",
    ),
    MetricRow(
        "rollout/balanced_ranks",
        "ranks",
        "number of the run's ranks to give the engines so that both sides take equally long, estimated from recent "
        "steps",
    ),
)

WINDOW = 5
"""Recent steps averaged to find the bottleneck."""
FEWEST = 3
"""Minimum steps to report the bottleneck. The first step never counts, because it includes one-time work."""
MARGIN = 0.1
"""A side is the bottleneck if the other side's idle share is larger by at least this."""


class Balance:
    """Detects whether trainer or engines are the bottleneck. Reports its first verdict and every change.

    `takes_turns`: trainer and engines never work at the same time, so both are partly idle with any number of ranks.
    """

    def __init__(
        self, num_trainers: int, num_engines: int, notify: Callable[[str], object], *, takes_turns: bool = False
    ) -> None:
        self._num_trainers, self._num_engines = num_trainers, num_engines
        self._notify, self._takes_turns = notify, takes_turns
        self._idle_shares: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """Idle fractions of the newest steps: (trainer, engines)."""
        self._is_first_step = True
        self._verdict = ""

    def observe_step(self, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the METRICS of a step, from its `seconds` so far and its metric `time/engines_idle`."""
        step_seconds, rollout_wait_seconds = seconds["time/step_seconds"], seconds.get("time/rollout_seconds", 0.0)
        trainer_idle_share = min(1.0, rollout_wait_seconds / max(step_seconds, 1e-9))
        step_metrics = {"time/rollout_waited_seconds": rollout_wait_seconds}
        # The first step includes one-time work, so its shares would mislead.
        if self._is_first_step:
            self._is_first_step = False
            return step_metrics
        self._idle_shares.append((trainer_idle_share, metrics["time/engines_idle"]))
        if len(self._idle_shares) < FEWEST:
            return step_metrics
        mean_trainer_idle, mean_engines_idle = (
            sum(shares) / len(self._idle_shares) for shares in zip(*self._idle_shares, strict=True)
        )
        balanced_ranks = self._compute_balanced_ranks(mean_trainer_idle, mean_engines_idle)
        self._report_bottleneck(mean_trainer_idle, mean_engines_idle, balanced_ranks)
        return step_metrics | {"rollout/balanced_ranks": balanced_ranks}

    def _compute_balanced_ranks(self, trainer_idle: float, engines_idle: float) -> float:
        """Return the number of engine ranks for equal load of trainer and engines, if work divides evenly
        over ranks.
        """
        training, sampling = (1 - trainer_idle) * self._num_trainers, (1 - engines_idle) * self._num_engines
        # The bound avoids 0 / 0 if both sides were idle throughout.
        return (self._num_trainers + self._num_engines) * sampling / max(training + sampling, 1e-9)

    def _report_bottleneck(self, trainer_idle: float, engines_idle: float, balanced_ranks: float) -> None:
        """Report which side is the bottleneck, if that changed. `balanced_ranks` engine ranks would balance both."""
        difference = trainer_idle - engines_idle
        slow_side = "engines" if difference > MARGIN else "trainer" if difference < -MARGIN else "neither"
        # Report changes only: a verdict repeated at each step would fill the log.
        if slow_side == self._verdict:
            return
        self._verdict = slow_side
        num_ranks = self._num_trainers + self._num_engines
        verdict_text = (
            "neither side is the bottleneck" if slow_side == "neither" else f"the bottleneck is the {slow_side}"
        )
        turns_text = "; under rollout.max_staleness = 0 one waits while the other works" if self._takes_turns else ""
        self._notify(
            f"{verdict_text}: over {len(self._idle_shares)} steps the trainer waited for samples {trainer_idle:.0%} of "
            f"the time, the engines were idle {engines_idle:.0%}{turns_text}. Of {num_ranks} ranks about "
            f"{balanced_ranks:.1f} for the engines would balance them (rollout.ranks, now {self._num_engines})"
        )
