"""Metrics of a step's speed: tokens and FLOPs per second, idle ranks, peak memory by phase."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.cluster.rank_model import RankModel, Work
from megarl.cluster.ranks.activity import Activity, phase_of_method
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.metrics import Metric, merge, values

METRICS = (
    MetricRow(
        "perf/tokens_per_second_per_rank",
        "tokens/s",
        "tokens of the step's updates, with prompts, divided by the step's time and the number of ranks (GPUs; on a "
        "CPU, processes)",
    ),
    MetricRow(
        "perf/train_tokens_per_second_per_rank",
        "tokens/s",
        "the same tokens divided by the time of phase train and the number of training ranks",
    ),
    MetricRow(
        "perf/rollout_tokens_per_second_per_rank",
        "tokens/s",
        "sampled tokens divided by the time of phase rollout and the number of sampling ranks; if attempts continue "
        "over steps (rollout.stragglers, max_staleness), perf/engines_open_seconds replaces the phase's time",
    ),
    MetricRow(
        "perf/tflops_per_rank",
        "TFLOP/s",
        "model FLOPs of the step's updates and scoring passes, divided by the number of training ranks and the time of "
        "phases train and logprobs",
    ),
    MetricRow(
        "perf/mfu",
        "share",
        "model FLOPs utilisation: perf/tflops_per_rank divided by the device's peak (cluster.peak_tflops, or a known "
        "GPU's)",
    ),
    MetricRow(
        "perf/represented_tokens",
        "tokens",
        "tokens of the sequences in all passes of the step's models",
        condition="trainer.share_prefixes=auto",
    ),
    MetricRow(
        "perf/stored_tokens",
        "tokens",
        "tokens computed in these passes: each distinct prefix of a microbatch counts once if it is stored as a tree",
    ),
    MetricRow(
        "perf/flops_saved", "share", "model FLOPs saved by shared prefixes, as a share of those of separate sequences"
    ),
    MetricRow(
        "perf/rows_not_shared",
        "microbatches",
        "number that would save more than 5 % of their FLOPs, but whose model cannot share prefixes; a message at the "
        "start names the reason",
    ),
    MetricRow(
        "time/ranks_idle", "share", "part of the step in which ranks ran no call from the driver, mean over ranks"
    ),
    MetricRow(
        "time/trainers_idle",
        "share",
        "part of the step in which training ranks ran no call from the driver, mean over ranks",
        condition="rollout.placement=separate",
    ),
    MetricRow(
        "memory/PHASE_gib",
        "GiB",
        "peak memory in use in a phase, on the fullest rank: of its device, or on a CPU of its process; scoring passes "
        "of an evaluation count as logprobs",
    ),
    MetricRow(
        "memory/PHASE_predicted_gib",
        "GiB",
        "the same as predicted by `megarl plan` before the start, for the measured phases",
    ),
)


class EvaluationMetrics(NamedTuple):
    """Metrics of a step's evaluation."""

    evaluation: dict[str, float]
    """Metrics of the engines, and peak memory."""
    whole_step_metrics: dict[str, float]
    """Metrics divided by the time of step and evaluation together; empty if an earlier start measured the step."""


class _BusySeconds(NamedTuple):
    """Mean seconds in calls per rank."""

    all_ranks: float
    trainers: float


class _EngineMeasurements(NamedTuple):
    """Measurements of engines since the previous measurement."""

    activities: list[Activity]
    """Call statistics of separate engines' ranks. Those of colocated engines are the trainers'."""
    metrics: list[dict[str, Metric]]
    """Metrics of all engines, by rank."""


@dataclass(frozen=True, slots=True)
class _MeasuredStep:
    """Tokens of a step's updates, mean seconds in calls of all ranks and of the trainers, and the step's seconds."""

    update_tokens: float
    busy_seconds: float
    trainers_busy_seconds: float
    seconds: float


class Performance:
    """Measures a run's steps, and returns METRICS and the engines' own metrics."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: RunRanks,
        models: Mapping[str, RankModel],
        predicted: Mapping[str, int] | None = None,
    ) -> None:
        """`predicted` has the planned bytes of the fullest rank by phase."""
        self._predicted = predicted or {}
        self._ranks = ranks
        self._work = models["policy"].work
        self._peak_tflops = recipe.cluster.peak_tflops
        self._knows_peak = self._peak_tflops is not None
        self._samples_between_steps = recipe.rollout.carries_groups
        self._has_begun = False
        self._first_began: float | None = None
        self._engine_request: asyncio.Future[_EngineMeasurements] | None = None
        self._last_step: _MeasuredStep | None = None
        """The last measured step, until its evaluation is measured."""

    async def begin_measuring(self) -> None:
        """Reset all counters once, before the run's first step, so start-up and first evaluation do not count."""
        if not self._has_begun:
            self._has_begun = True
            await self._ranks.call("__activity__")
            await self._ranks.call_engines("engine_metrics")
            self._work.take()
            self._first_began = time.monotonic()

    def ask_engines(self) -> asyncio.Future[_EngineMeasurements]:
        """Request the engines' measurements now. Otherwise the next `measure_step` requests them."""

        async def ask() -> _EngineMeasurements:
            activities = await self._ranks.call_engines("__activity__") if self._ranks.is_separate else []
            return _EngineMeasurements(activities, await self._ranks.call_engines("engine_metrics"))

        # A request sent before a background reshard is answered at once. A later one would wait for the weights.
        self._engine_request = asyncio.ensure_future(ask())
        # Retrieve the exception, or asyncio warns of it if the run ends before `measure_step` raises it.
        self._engine_request.add_done_callback(lambda request: request.cancelled() or request.exception())
        return self._engine_request

    async def measure_step(self, seconds: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the time since the previous call.

        `seconds` are the step's times by name, `scalars` its metrics so far.
        """
        if self._first_began is not None:
            # The tracker counts the first step's time from the start of the run, start-up included.
            seconds_since_first = time.monotonic() - self._first_began
            seconds = {**seconds, "time/step_seconds": min(seconds_since_first, seconds["time/step_seconds"])}
            self._first_began = None
        await self._ask_for_peak()
        activities, engines = await self._take_measurements()
        # The bound avoids a division by zero in a step that took no measurable time.
        step_seconds = max(seconds["time/step_seconds"], 1e-9)
        memory = peak_memory(activities)
        computed_work = self._work.take()
        update_tokens = computed_work.update_tokens if seconds.get("time/train_seconds") else 0.0
        self._last_step = _MeasuredStep(update_tokens, *self._busy_seconds(activities), step_seconds)
        metrics = engines | memory | self._predicted_metrics(memory) | self._idle_metrics(self._last_step)
        return metrics | self._compute_throughput(computed_work, seconds, scalars)

    async def measure_evaluation(self, seconds: Mapping[str, float]) -> EvaluationMetrics:
        """Return the metrics since the step's measurement. `seconds` are the evaluation's by phase.

        The next step's measurement begins here.
        """
        activities, engines = await self._take_measurements()
        memory = peak_memory(activities)
        last_step, self._last_step = self._last_step, None
        whole_step_metrics: dict[str, float] = {}
        if last_step is not None:
            busy_seconds = self._busy_seconds(activities)
            whole_step_metrics = self._idle_metrics(
                _MeasuredStep(
                    last_step.update_tokens,
                    last_step.busy_seconds + busy_seconds.all_ranks,
                    last_step.trainers_busy_seconds + busy_seconds.trainers,
                    last_step.seconds + seconds["time/step_seconds"],
                )
            )
        return EvaluationMetrics(engines | memory | self._predicted_metrics(memory), whole_step_metrics)

    def _busy_seconds(self, activities: Sequence[Activity]) -> _BusySeconds:
        return _BusySeconds(mean_busy(activities), mean_busy(activities[: self._ranks.trainers.world_size]))

    def _idle_metrics(self, step: _MeasuredStep) -> dict[str, float]:
        """Return the idle shares of ranks and trainers in a step, and its training throughput."""
        metrics = {"time/ranks_idle": idle_share(step.busy_seconds, step.seconds)}
        if self._ranks.is_separate:
            metrics["time/trainers_idle"] = idle_share(step.trainers_busy_seconds, step.seconds)
        if step.update_tokens:
            rate = step.update_tokens / step.seconds / self._ranks.world_size
            metrics["perf/tokens_per_second_per_rank"] = rate
        return metrics

    async def _take_measurements(self) -> tuple[list[Activity], dict[str, float]]:
        """Fetch and reset the ranks' call statistics, trainers first, and the engines' metrics."""
        activities: list[Activity] = await self._ranks.trainers.call("__activity__")
        request, self._engine_request = self._engine_request or self.ask_engines(), None
        engines = await request
        return [*activities, *engines.activities], values(merge(engines.metrics))

    def _predicted_metrics(self, memory: Mapping[str, float]) -> dict[str, float]:
        phases = [phase for phase in self._predicted if f"memory/{phase}_gib" in memory]
        return {f"memory/{phase}_predicted_gib": self._predicted[phase] / 2**30 for phase in phases}

    def _compute_throughput(
        self, work: Work, seconds: Mapping[str, float], step_metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the metrics of tokens and FLOPs per second and rank.

        `seconds` are the step's times by name, `step_metrics` its metrics so far.
        """
        num_ranks, num_trainers = self._ranks.world_size, self._ranks.trainers.world_size
        # Colocated ranks train and sample, so then all of them count as samplers.
        num_samplers = num_ranks - num_trainers or num_ranks
        step_seconds, train_seconds = seconds["time/step_seconds"], seconds.get("time/train_seconds", 0.0)
        scoring_seconds, rollout_seconds = (
            seconds.get("time/logprobs_seconds", 0.0),
            seconds.get("time/rollout_seconds", 0.0),
        )
        metrics: dict[str, float] = {}
        if work.update_tokens and train_seconds:
            metrics["perf/train_tokens_per_second_per_rank"] = work.update_tokens / train_seconds / num_trainers
        if self._samples_between_steps:
            # Sampling continues between steps, so it starts at the reshard and not at the begin of the phase.
            rollout_seconds = max(
                rollout_seconds, min(step_seconds, step_metrics.get("perf/engines_open_seconds", 0.0))
            )
        if rollout_seconds and "rollout/sampled_tokens" in step_metrics:
            num_sampled_tokens = step_metrics["rollout/sampled_tokens"]
            metrics["perf/rollout_tokens_per_second_per_rank"] = num_sampled_tokens / rollout_seconds / num_samplers
        if work.represented_tokens:
            metrics["perf/represented_tokens"] = float(work.represented_tokens)
            metrics["perf/stored_tokens"] = float(work.stored_tokens)
            metrics["perf/rows_not_shared"] = float(work.refused_rows)
            if work.flops:
                metrics["perf/flops_saved"] = work.saved_flops / (work.flops + work.saved_flops)
        if work.flops and train_seconds + scoring_seconds:
            tflops = work.flops / (train_seconds + scoring_seconds) / num_trainers / 1e12
            metrics["perf/tflops_per_rank"] = tflops
            if self._peak_tflops is not None:
                metrics["perf/mfu"] = tflops / self._peak_tflops
        return metrics

    async def _ask_for_peak(self) -> None:
        """Fetch the peak TFLOP/s of the trainers' devices once: the smallest, or None if one is unknown."""
        if not self._knows_peak:
            peaks = await self._ranks.trainers.call("peak_tflops")
            self._peak_tflops = None if None in peaks else min(peaks)
            self._knows_peak = True


def mean_busy(activities: Sequence[Activity]) -> float:
    return sum(activity.busy_seconds for activity in activities) / len(activities)


def idle_share(busy_seconds: float, seconds: float) -> float:
    """Return the share of `seconds` outside of calls, from 0 to 1."""
    # Ranks time the calls, and the driver times the step. So the share can be slightly outside [0, 1].
    return min(1.0, max(0.0, 1 - busy_seconds / seconds))


def peak_memory(activities: Sequence[Activity]) -> dict[str, float]:
    """Return `memory/PHASE_gib`, the largest peak of any rank in each phase."""
    peaks: dict[str, float] = {}
    for activity in activities:
        for method, num_bytes in activity.peak_bytes.items():
            if (phase := phase_of_method(method)) is not None:
                name = f"memory/{phase}_gib"
                peaks[name] = max(peaks.get(name, 0.0), num_bytes / 2**30)
    return peaks
