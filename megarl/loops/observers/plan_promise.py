"""Comparison of each step with the plan made before the start: memory by phase, and seconds."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config import Recipe
from megarl.loops.observers.step_observer import StepObserver
from megarl.loops.step import Step
from megarl.planner.layouts.recipe_seconds import recipe_seconds
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.tracker import Tracker

METRICS = (
    MetricRow(
        "plan/memory_ratio",
        "ratio",
        "measured over planned memory, of the phase where it is largest; above 1 the run takes more than planned",
    ),
    MetricRow(
        "plan/seconds_ratio",
        "ratio",
        "measured over planned seconds of the step, from the second step on, for recipes that `megarl plan --search` "
        "covers; the plan assumes mean completions of a quarter of their limit",
    ),
)

_MEMORY_LIMIT, _SECONDS_LIMIT = 1.25, 2.0
"""Ratios of measured to planned values beyond which a notice names the phase. The cost model's largest error on
held-out steps is 55 %.
"""
_PHASES = ("rollout", "logprobs", "train", "reshard")


class PlanPromise(StepObserver):
    """Compares a run's steps with its plan, and names the phase that exceeds the plan."""

    def __init__(self, recipe: Recipe, tracker: Tracker, predicted_memory: Mapping[str, int]) -> None:
        """`predicted_memory` has the planned bytes of the fullest rank by phase."""
        self._recipe, self._tracker = recipe, tracker
        self._planned_gib = {phase: num_bytes / 2**30 for phase, num_bytes in predicted_memory.items()}
        self._planned_seconds: Mapping[str, float] = {}
        self._is_past_first_step = False

    async def begin_run(self) -> None:
        if (seconds := recipe_seconds(self._recipe)) is not None:
            self._planned_seconds = {name: getattr(seconds, name) for name in ("step", *_PHASES)}

    async def observe_measured(self, step: Step) -> None:
        """Compare a step's memory and seconds with the plan in its metrics, and report when one first exceeds it."""
        self._compare_memory(step)
        # The first step of a start compiles kernels and fills caches.
        if self._planned_seconds and self._is_past_first_step:
            self._compare_seconds(step)
        self._is_past_first_step = True

    def _compare_memory(self, step: Step) -> None:
        """Log the largest ratio of measured to planned memory among the phases. Warn once if it is too large."""
        names = {phase: f"memory/{phase}_gib" for phase in self._planned_gib}
        peak_gib = {phase: step.metrics[name] for phase, name in names.items() if name in step.metrics}
        ratios = {phase: gib / self._planned_gib[phase] for phase, gib in peak_gib.items() if self._planned_gib[phase]}
        if not ratios:
            return
        phase = max(ratios, key=lambda name: ratios[name])
        step.log({"plan/memory_ratio": ratios[phase]})
        if ratios[phase] > _MEMORY_LIMIT:
            self._tracker.notice_once(
                "plan memory",
                f"step {step.number}: {phase} took {peak_gib[phase]:.1f} GiB on a rank, {ratios[phase]:.2f} times the "
                f"{self._planned_gib[phase]:.1f} GiB that megarl plan promised (plan/memory_ratio)",
            )

    def _compare_seconds(self, step: Step) -> None:
        """Log the ratio of measured to planned seconds. Warn once of a large ratio, and name the worst phase."""
        seconds = self._tracker.seconds
        step_ratio = seconds["time/step_seconds"] / self._planned_seconds["step"]
        step.log({"plan/seconds_ratio": step_ratio})
        if step_ratio <= _SECONDS_LIMIT:
            return
        excess = {name: seconds.get(f"time/{name}_seconds", 0.0) - self._planned_seconds[name] for name in _PHASES}
        worst_phase = max(excess, key=lambda name: excess[name])
        self._tracker.notice_once(
            "plan seconds",
            f"step {step.number}: took {step_ratio:.2f} times the {self._planned_seconds['step']:.1f} s that megarl "
            f"plan promised (plan/seconds_ratio), most of it in {worst_phase}: "
            f"{seconds.get(f'time/{worst_phase}_seconds', 0.0):.1f} s instead of "
            f"{self._planned_seconds[worst_phase]:.1f}",
        )
