"""Measurement of a run's steps: throughput, utilisation, memory, bottleneck, traces.

Traces (`train.profile_steps`) show the spans of driver and ranks on one time axis, or are profiles by torch.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.cluster.rank_model import RankModel, Work
from megarl.cluster.ranks.activity import Activity, phase_of_method
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.files.atomic import replace_text
from megarl.platform.spans import Span, measure_span_seconds, record
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.metrics import Metric, merge, values
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.trace import Track, chrome_trace, covered_share
from megarl.tracking.tracker import Tracker

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
"""Minimum difference of idle shares. The trainer is the bottleneck if the engines' share is larger, and vice versa."""

Call = Callable[[str, bool], Awaitable[list[Any]]]
"""Async function (method, argument) that calls a method of all ranks of a group."""

_SAME_CLOCK_SECONDS = 0.1
"""Clock offsets below this count as 0. Monotonic clocks start at boot. Two machines hardly boot within 0.1 s, so a
small offset means one machine.
"""


class EvaluationMetrics(NamedTuple):
    """Metrics of a step's evaluation."""

    evaluation: dict[str, float]
    """Metrics of the engines, and peak memory."""
    whole_step: dict[str, float]
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


class _Clocks(NamedTuple):
    """Monotonic clocks of ranks, read between a request and its last answer at the driver. All in seconds."""

    request_began: float
    answered: float
    readings: list[float]

    @property
    def duration(self) -> float:
        return self.answered - self.request_began


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

    async def begin(self) -> None:
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
        whole_step: dict[str, float] = {}
        if last_step is not None:
            busy_seconds = self._busy_seconds(activities)
            whole_step = self._idle_metrics(
                _MeasuredStep(
                    last_step.update_tokens,
                    last_step.busy_seconds + busy_seconds.all_ranks,
                    last_step.trainers_busy_seconds + busy_seconds.trainers,
                    last_step.seconds + seconds["time/step_seconds"],
                )
            )
        return EvaluationMetrics(engines | memory | self._predicted_metrics(memory), whole_step)

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


class Balance:
    """Detects whether trainer or engines are the bottleneck. Reports its first verdict and every change.

    `takes_turns`: trainer and engines never work at the same time, so both are partly idle with any number of ranks.
    """

    def __init__(
        self, num_trainers: int, num_engines: int, notify: Callable[[str], object], *, takes_turns: bool = False
    ) -> None:
        self._num_trainers, self._num_engines = num_trainers, num_engines
        self._notify, self._takes_turns = notify, takes_turns
        self._idle: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._is_first = True
        self._verdict = ""

    def observe_step(self, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the METRICS of a step, from its `seconds` so far and its metric `time/engines_idle`."""
        step_seconds, rollout_wait_seconds = seconds["time/step_seconds"], seconds.get("time/rollout_seconds", 0.0)
        trainer_idle_share = min(1.0, rollout_wait_seconds / max(step_seconds, 1e-9))
        step_metrics = {"time/rollout_waited_seconds": rollout_wait_seconds}
        # The first step includes one-time work, so its shares would mislead.
        if self._is_first:
            self._is_first = False
            return step_metrics
        self._idle.append((trainer_idle_share, metrics["time/engines_idle"]))
        if len(self._idle) < FEWEST:
            return step_metrics
        mean_trainer_idle, mean_engines_idle = (
            sum(shares) / len(self._idle) for shares in zip(*self._idle, strict=True)
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
            f"{verdict_text}: over {len(self._idle)} steps the trainer waited for samples {trainer_idle:.0%} of the "
            "time, "
            f"the engines were idle {engines_idle:.0%}{turns_text}. Of {num_ranks} ranks about {balanced_ranks:.1f} "
            f"for the engines would balance them (rollout.ranks, now {self._num_engines})"
        )


class Profiles:
    """Writes traces of steps to profiles/ in the run folder.

    Separate engines answer only after they have received the weights being sent. No step waits for that: their spans
    are fetched and the trace is written in the background.
    """

    def __init__(
        self, ranks: RunRanks, folder: RunFolder, tracker: Tracker, means: Collection[str] = ("spans",)
    ) -> None:
        """Create the recorder. `means` are the values of train.profile_with."""
        self._ranks, self._folder, self._tracker = ranks, folder, tracker
        self._has_spans = "spans" in means
        self._by_torch = [kind for kind in means if kind != "spans"]
        self._writing: asyncio.Task[None] | None = None
        """Task that writes the newest step's trace."""

    @asynccontextmanager
    async def record_step(self, number: int) -> AsyncIterator[None]:
        """Context that profiles one step. A failed step has no profile."""
        async with AsyncExitStack() as stack:
            # Spans last, so that they do not include the start and the files of torch's profiles.
            if self._by_torch:
                await stack.enter_async_context(self._profiled_by_torch(number))
            if self._has_spans:
                await stack.enter_async_context(self._spans_recorded(number))
            yield

    @asynccontextmanager
    async def _profiled_by_torch(self, number: int) -> AsyncIterator[None]:
        """Context of one step: torch profiles all ranks, and writes files to profiles/step_NNNNNN/."""
        await self._ranks.call("__profile__", self._by_torch)
        yield
        folder = self._folder.profiles_folder.absolute() / f"step_{number:06d}"
        names = await self._ranks.call_with_first_rank("__profile_end__", folder)
        files = sum(map(len, names))
        self._tracker.info(f"profile of step {number}: {files} files of {' and '.join(self._by_torch)} in {folder}")

    @asynccontextmanager
    async def _spans_recorded(self, number: int) -> AsyncIterator[None]:
        """Context of one step: driver and ranks record spans, and their trace is written."""
        # Not awaited here: the engines may be busy receiving weights, and the step must not wait for them.
        offsets_of_engines = asyncio.create_task(self._begin_engines(self._writing))
        try:
            offsets = await _start_spans(self._ranks.trainers.call)
            record(True)
            began = time.monotonic()
            try:
                yield
                step_span = (f"step {number}", began, time.monotonic())
            finally:
                driver_spans = record(False)
            trainer_answers = await self._ranks.trainers.call("__spans__", False)
        # Includes cancellation: a signal may end the step.
        except BaseException:
            offsets_of_engines.cancel()
            raise
        spans = [spans for _, spans in trainer_answers]
        trace_values = {"step": number, "seconds_of_a_span": measure_span_seconds()}
        self._writing = asyncio.create_task(
            self._write(step_span, driver_spans, offsets, spans, offsets_of_engines, trace_values)
        )
        if not self._ranks.is_separate:
            await self._writing

    async def finish(self) -> None:
        if self._writing is not None:
            await self._writing

    async def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            # Wait for the end of the task: it uses the ranks, closed next.
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _begin_engines(self, earlier: asyncio.Task[None] | None) -> list[float]:
        """Start recording spans on separate engines, after the `earlier` trace. Return offsets like `_start_spans`."""
        if not self._ranks.is_separate:
            return []
        if earlier is not None:
            await earlier
        return await _start_spans(self._ranks.call_engines)

    async def _write(
        self,
        step_span: Span,
        driver_spans: list[Span],
        offsets: list[float],
        spans: list[list[Span]],
        offsets_of_engines: asyncio.Task[list[float]],
        trace_values: dict[str, Any],
    ) -> None:
        """Write the trace of a step.

        `spans` and `offsets` are those of the trainer ranks, `trace_values` values shown with the trace.
        """
        offsets = offsets + await offsets_of_engines
        if self._ranks.is_separate:
            spans = spans + [rank_spans for _, rank_spans in await self._ranks.call_engines("__spans__", False)]
        number = trace_values["step"]
        # Spans and offsets are matched by position, so a changed set of engines would mix up ranks.
        if len(spans) != len(offsets):
            self._tracker.notice(f"step {number} has no profile: an engine was lost or has joined during the step")
            return
        # Shift the ranks' spans to the driver's clock, so that all share one time axis.
        tracks = [Track("driver", driver_spans)] + [
            Track(f"rank {rank} on {self._ranks.topology[rank][0]}", rank_spans).shift(offset)
            for rank, (rank_spans, offset) in enumerate(zip(spans, offsets, strict=True))
        ]
        share, rank_share = covered_share(tracks, step_span), covered_share(tracks[1:], step_span)
        trace_values = trace_values | {
            "covered": share,
            "covered_by_ranks": rank_share,
            "spans": [len(track.spans) for track in tracks],
        }
        path = self._folder.profiles_folder / f"step_{number:06d}.json"
        path.parent.mkdir(exist_ok=True)
        replace_text(path, json.dumps(chrome_trace(tracks, step_span, trace_values)))
        self._tracker.info(
            f"profile of step {number}: {path}, {share:.1%} of its time in spans, {rank_share:.1%} in calls of "
            "ranks; open it in ui.perfetto.dev"
        )


async def _start_spans(call: Call) -> list[float]:
    """Start recording spans on ranks. Return for each rank the seconds by which the driver's clock is ahead."""
    # In the first round ranks may still be busy. The round with the shorter answer time bounds the offset better.
    rounds = [await _ask_clocks(call) for _ in range(2)]
    clocks = min(rounds, key=lambda clocks: clocks.duration)
    # As in NTP: the clock was read about halfway between request and answer.
    offsets = [(clocks.request_began + clocks.answered) / 2 - reading for reading in clocks.readings]
    return [0.0 if abs(offset) < max(_SAME_CLOCK_SECONDS, clocks.duration) else offset for offset in offsets]


async def _ask_clocks(call: Call) -> _Clocks:
    """Start recording spans on ranks. Return the times of request and last answer, and each rank's clock."""
    request_began = time.monotonic()
    readings = [clock for clock, _ in await call("__spans__", True)]
    return _Clocks(request_began, time.monotonic(), readings)
