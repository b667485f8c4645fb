"""When a run copies the trainer's weights to its engines: between two steps, or in the background of a step."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

from megarl.cluster.replacements import Replacements
from megarl.cluster.reshard_calls import Reports, ReshardCalls
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.loops.measuring.performance import Performance
from megarl.loops.observers.weight_checks import WeightChecks
from megarl.platform.spans import span
from megarl.rollout.pool import EnginePool
from megarl.tracking.metric_rows import ALL_RANKS, MetricRow

METRICS = (
    MetricRow(
        "time/reshard_STAGE_seconds",
        "seconds",
        "a stage of the reshard on the slowest rank: meet (wait for the last rank; with weights.overlap until the "
        "engines have paused), pack, wire, local, unpack, quantise, total, verify",
    ),
    MetricRow(
        "time/reshard_hidden_seconds",
        "seconds",
        "how long the trainer worked while the weights were sent to the engines",
        condition="weights.overlap",
    ),
    MetricRow(
        "time/reshard_waited_seconds",
        "seconds",
        "part of the reshard: how long the trainer waited for the previous step's reshard to end",
        condition="weights.overlap",
    ),
    MetricRow(
        "perf/engine_pause_seconds",
        "seconds",
        "how long separate engines sampled nothing because of a reshard: pausing, and receiving the weights",
    ),
    MetricRow("rollout/replicas", "count", "number of separate engines sampling after the step's reshard"),
    MetricRow(
        "rollout/lost_requests",
        "count",
        "requests of the step on a lost separate engine; other engines continued them from the retained tokens",
    ),
    MetricRow("reshard/KIND_bytes", "bytes", "bytes moved by the reshard in this way", ALL_RANKS),
    MetricRow(
        "reshard/probe_gap",
        "nats",
        "distance between the log-probs of an engine with converted weights and the trainer's, where compared",
    ),
    MetricRow(
        "lora/lost_in_merge",
        "fraction",
        "norm of what rounding the merged weights changed, relative to the norm of the adapters' update; at 1 the "
        "engine gets as much noise as update",
        condition="lora.sync=merged",
    ),
)
"""Metrics of a background reshard are logged with the step in which it ran."""
_STATES = ("reshard/probe_gap", "lora/lost_in_merge")
"""Metrics of the state after a reshard. They are not added over two reshards."""


class ReshardSchedule:
    """Copies the trainer's weights into the engines after a step. `replacements` restarts lost separate engines."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: RunRanks,
        reshard_calls: ReshardCalls,
        replacements: Replacements,
        pool: EnginePool,
        performance: Performance,
        checks: WeightChecks,
    ) -> None:
        self._checks = checks
        self._recipe, self._ranks, self._reshard_calls, self._replacements = recipe, ranks, reshard_calls, replacements
        self._pool, self._performance = pool, performance
        self._background_reshard: asyncio.Task[dict[str, float]] | None = None
        self._reports: Reports = []
        """The engines' reports of the background reshard."""

    async def sleep_engines(self) -> None:
        """Pause colocated engines and free their memory for the trainer, until the next reshard.

        Does nothing for separate engines, and for engines already asleep.
        """
        # Colocated engines are paused by this method only. `run_reshard` wakes the engines, then resumes the pool.
        if self._ranks.is_separate or self._pool.is_paused:
            return
        with span("sleep engines"):
            await self._pool.pause()
            self._checks.refuse_changes(await self._ranks.trainers.call("sleep_engine"))

    async def check_last_version(self) -> None:
        """Compare the weights of trainer and separate engines with their checksums, at the run's end.

        Earlier versions are compared before the next one is written, and colocated engines before they sleep. Raises
        MegarlError if weights changed.
        """
        if self._ranks.is_separate and self._recipe.weights.check_every:
            await self._pool.pause()
            self._checks.refuse_changes(await self._ranks.call_engines("compare_weights"))
            self._pool.resume()
        await self._checks.check_trainer()

    async def run_reshard(self, step: int) -> dict[str, float]:
        """Copy the weights and wait. Returns metrics: seconds of the slowest rank, and bytes of all ranks.

        First completes a background reshard, and includes its metrics. Requests in separate engines pause, then
        continue with the new weights.
        """
        earlier_metrics = await self.finish_reshard()
        if self._ranks.is_separate:
            reports, pause_metrics = await self._reshard_separate_engines(step)
        else:
            # Colocated engines hold no requests now: they were paused before they slept.
            reports, pause_metrics = await self._reshard_calls.run(self._is_verified(step), step + 1), {}
        await self._checks.check_engines(reports)
        self._pool.resume()
        return _add_earlier_metrics(earlier_metrics, reshard_metrics(reports) | pause_metrics)

    async def begin_reshard(self, step: int) -> dict[str, float]:
        """Start a background reshard if the recipe allows it at this step, else reshard and wait.

        On return, the trainers have copies of their weights. The engines have paused, so all tokens sampled so far
        count in this step. `finish_reshard` waits until the engines have the weights. Returns the metrics of the
        previous background reshard, or those of `run_reshard`.
        """
        earlier_metrics = await self.finish_reshard()
        # A restarted replica joins through a new cross-world process group. The trainers must help create it, so this
        # reshard cannot run in the background.
        can_overlap = self._reshard_calls.is_connected and not self._replacements.has_started
        if not (self._recipe.overlaps_at(step) and can_overlap):
            return _add_earlier_metrics(earlier_metrics, await self.run_reshard(step))
        copies_made = asyncio.get_running_loop().create_future()
        self._background_reshard = asyncio.create_task(self._send_weights(step, copies_made))
        # The task may fail before `copies_made` is set. Then its error is raised here.
        await asyncio.wait([self._background_reshard, copies_made], return_when=asyncio.FIRST_COMPLETED)
        if not copies_made.done():
            self._background_reshard.result()
        return earlier_metrics

    async def finish_reshard(self) -> dict[str, float]:
        """Wait for the background reshard, and return its metrics; empty without one."""
        if self._background_reshard is None:
            return {}
        wait_began = time.monotonic()
        with span("finish reshard"):
            metrics = await self._background_reshard
            trainer_reports = await self._reshard_calls.collect_reports()
        self._background_reshard = None
        await self._checks.check_engines(self._reports)
        return (
            metrics
            | reshard_metrics([*trainer_reports, *self._reports])
            | {"time/reshard_waited_seconds": time.monotonic() - wait_began}
        )

    async def close(self) -> None:
        if self._background_reshard is not None:
            self._background_reshard.cancel()
            await asyncio.gather(self._background_reshard, return_exceptions=True)

    def _is_verified(self, step: int) -> bool:
        interval = self._recipe.weights.verify_every
        return interval > 0 and step % interval == 0

    async def _reshard_separate_engines(self, step: int) -> tuple[Reports, dict[str, float]]:
        """Pause separate engines, let restarted replicas join, and reshard.

        Returns the ranks' reports and the metrics of the pause.
        """
        pause_began = time.monotonic()
        with span("pause engines"):
            await self._pool.pause(aborts=self._recipe.rollout.recompute_kv)
        # Remove lost replicas before their replacements join: both have the same first rank. The requests of the lost
        # ones must move to other replicas.
        self._pool.set_live_replicas(self._leaders)
        self._reshard_calls.add(self._replacements.take())
        # The update of step N makes weight version N + 1.
        reports = await self._reshard_calls.run(self._is_verified(step), step + 1)
        return reports, self._resume_engines(pause_began)

    async def _send_weights(self, step: int, copies_made: asyncio.Future[None]) -> dict[str, float]:
        """Reshard from copies of the trainers' weights, and return the metrics.

        Sets `copies_made` when the trainers have the copies and the engines have paused.
        """
        pause_began = time.monotonic()
        trainer_seconds_before = 0.0

        def continue_training() -> None:
            nonlocal trainer_seconds_before
            trainer_seconds_before = self._ranks.trainers.seconds_in_calls
            pause_task.add_done_callback(report_copies_made)

        def report_copies_made(pause_task: asyncio.Task[None]) -> None:
            # If the pause failed, `_send_weights` fails too. `begin_reshard` waits for it or for `copies_made`.
            if not pause_task.cancelled() and pause_task.exception() is None and not copies_made.done():
                copies_made.set_result(None)

        # Request them now: a later request is answered only after the engines have the weights, and would delay the
        # step.
        engine_measurements = self._performance.ask_engines()
        pause_task = asyncio.create_task(self._pool.pause(aborts=self._recipe.rollout.recompute_kv))
        engines_paused = asyncio.gather(pause_task, asyncio.wait([engine_measurements]))
        try:
            self._reports = await self._reshard_calls.run_overlapping(
                self._is_verified(step), step + 1, engines_paused, continue_training
            )
            metrics = self._resume_engines(pause_began)
        except Exception as error:
            # Fail pending completions, or their coroutines would wait forever.
            self._pool.fail(error)
            raise
        finally:
            engines_paused.cancel()
            await asyncio.gather(engines_paused, return_exceptions=True)
        self._pool.resume()
        return metrics | {"time/reshard_hidden_seconds": self._ranks.trainers.seconds_in_calls - trainer_seconds_before}

    def _resume_engines(self, pause_began: float) -> dict[str, float]:
        """Let the engines with the new weights sample again. Return the metrics of the pause since `pause_began`."""
        self._pool.set_live_replicas(self._leaders)
        return {
            "perf/engine_pause_seconds": time.monotonic() - pause_began,
            "rollout/replicas": float(len(self._ranks.replicas)),
            "rollout/lost_requests": float(self._pool.take_lost()),
        }

    @property
    def _leaders(self) -> set[int]:
        """First ranks of the engine replicas that are alive."""
        return {group.part.first_rank for group in self._ranks.replicas}


def reshard_metrics(reports: Reports) -> dict[str, float]:
    """Return a reshard's metrics: the slowest rank's seconds of each stage, and the bytes of all ranks."""
    # Stages differ between ranks: sampling ranks have some that training ranks lack.
    stages = dict.fromkeys(stage for report in reports for stage in report.seconds)
    seconds = {
        f"time/reshard_{stage}_seconds": max(report.seconds.get(stage, 0.0) for report in reports) for stage in stages
    }
    transferred_bytes = {
        f"reshard/{kind}_bytes": float(sum(report.num_bytes[kind] for report in reports))
        for kind in reports[0].num_bytes
    }
    probe_gaps = [report.probe_gap for report in reports if report.probe_gap is not None]
    return (
        seconds
        | transferred_bytes
        | ({"reshard/probe_gap": max(probe_gaps)} if probe_gaps else {})
        | _compute_rounding_metrics(reports)
    )


def _compute_rounding_metrics(reports: Reports) -> dict[str, float]:
    """Return the share of the merged update lost by rounding; empty before the first update."""
    roundings = [report.rounding for report in reports if report.rounding is not None]
    squared_update = sum(rounding.squared_update for rounding in roundings)
    if not squared_update:
        return {}
    squared_error = sum(rounding.squared_error for rounding in roundings)
    return {"lora/lost_in_merge": (squared_error / squared_update) ** 0.5}


def _add_earlier_metrics(earlier: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Add the metrics of two reshards that ended in one step. Metrics in `_STATES` are those of the later one."""
    # Counter.update adds values, dict.update would replace them.
    total = Counter(earlier)
    total.update(metrics)
    states = {name: metrics[name] for name in _STATES if name in metrics}
    return {**total, **states, "rollout/replicas": metrics["rollout/replicas"]} if earlier else dict(metrics)
