"""Throughput, utilisation and memory of a step, from measurements of the ranks and the driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from megarl.cluster.activity import Activity
from megarl.cluster.rank_model import RankModel
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.tracking.metrics import Metric, merge, values

METRICS = {
    "perf/tokens_per_second_per_rank": (
        "tokens/s",
        "tokens of the step's updates, with prompts, divided by the step's time and the number of ranks "
        "(GPUs; on a CPU, processes)",
    ),
    "perf/train_tokens_per_second_per_rank": (
        "tokens/s",
        "the same tokens divided by the time of phase train and the number of training ranks",
    ),
    "perf/rollout_tokens_per_second_per_rank": (
        "tokens/s",
        "sampled tokens divided by the time of phase rollout and the number of sampling ranks; if attempts "
        "continue over steps (rollout.stragglers, max_staleness), perf/engines_open_seconds replaces the "
        "phase's time",
    ),
    "perf/tflops_per_rank": (
        "TFLOP/s",
        "model FLOPs of the step's updates and scoring passes, divided by the number of training ranks and "
        "the time of phases train and logprobs",
    ),
    "perf/mfu": (
        "share",
        "model FLOPs utilisation: perf/tflops_per_rank divided by the device's peak (cluster.peak_tflops, or "
        "a known GPU's)",
    ),
    "time/ranks_idle": ("share", "part of the step in which ranks ran no call from the driver, mean over ranks"),
    "time/trainers_idle": ("share", "the same for training ranks, with separate engines (rollout.placement separate)"),
    "memory/PHASE_gib": (
        "GiB",
        "peak memory in use in a phase, on the fullest rank: of its device, or on a CPU of its process; "
        "scoring passes of an evaluation count as logprobs",
    ),
    "memory/PHASE_predicted_gib": (
        "GiB",
        "the same as predicted by `megarl plan` before the start, for the measured phases",
    ),
}
"""Metrics reported by this module: unit and meaning by metric name. `megarl metrics` lists them."""

_PHASES = {
    "advance": "rollout",
    "forward": "logprobs",
    "forward_with_entropies": "logprobs",
    "teach": "train",
    "update": "train",
    "reshard": "reshard",
    "start_reshard": "reshard",
    "save_checkpoint": "checkpoint",
    "export": "export",
}
"""Phase of a step that a call to the ranks belongs to, by method name. `policy.update` counts as `update`."""
_OfEngines = tuple[list[Activity], list[dict[str, Metric]]]
"""Call statistics of separate engines' ranks, and metrics of all engines, since they were last fetched."""


class Performance:
    """Measures a run's steps: METRICS, and the engines' own metrics."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: RunRanks,
        models: Mapping[str, RankModel],
        predicted: Mapping[str, int] | None = None,
    ) -> None:
        """Create the measurement. `predicted` has the planned bytes of the rank with most memory, by phase."""
        self._predicted = predicted or {}
        self._ranks = ranks
        self._work = models["policy"].work
        self._peak_tflops = recipe.cluster.peak_tflops
        self._knows_peak = self._peak_tflops is not None
        self._goes_on = recipe.rollout.carries_groups
        self._has_begun = False
        self._first_began: float | None = None
        self._asked: asyncio.Future[_OfEngines] | None = None

    async def begin(self) -> None:
        """Reset all counters before the run's first step, so that start-up and first evaluation are not counted."""
        if not self._has_begun:
            self._has_begun = True
            await self._ranks.call("__activity__")
            await self._ranks.call_engines("engine_metrics")
            self._work.take()
            self._first_began = time.monotonic()

    def ask_engines(self) -> asyncio.Future[_OfEngines]:
        """Fetch the engines' measurements now, for the next `of_step`. If not called, `of_step` fetches them."""

        async def ask() -> _OfEngines:
            activities = await self._ranks.call_engines("__activity__") if self._ranks.is_separate else []
            return activities, await self._ranks.call_engines("engine_metrics")

        # A request sent before a background reshard is answered at once. A later one would wait for the weights.
        self._asked = asyncio.ensure_future(ask())
        # Retrieve the exception, or asyncio warns of it if the run ends before `of_step` raises it.
        self._asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        return self._asked

    async def of_step(self, seconds: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the time since the previous call.

        `seconds` are the step's times by name, `scalars` the step's metrics so far.
        """
        if self._first_began is not None:
            # The tracker counts the first step's time from the start of the run, start-up included.
            own = time.monotonic() - self._first_began
            seconds = {**seconds, "time/step_seconds": min(own, seconds["time/step_seconds"])}
            self._first_began = None
        await self._ask_for_peak()
        activities: list[Activity] = await self._ranks.trainers.call("__activity__")
        asked, self._asked = self._asked or self.ask_engines(), None
        of_engines, found = await asked
        activities += of_engines
        engines = values(merge(found))
        # The bound avoids a division by zero in a step that took no measurable time.
        whole = max(seconds["time/step_seconds"], 1e-9)
        memory = peak_memory(activities)
        metrics = engines | memory | self._planned(memory) | {"time/ranks_idle": idle_share(activities, whole)}
        if self._ranks.is_separate:
            # The first activities are those of the trainers; separate engines were appended.
            metrics["time/trainers_idle"] = idle_share(activities[: self._ranks.trainers.world_size], whole)
        return metrics | self._throughput(seconds, scalars)

    def _planned(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Return `memory/PHASE_predicted_gib` for the phases whose memory was measured."""
        phases = [phase for phase in self._predicted if f"memory/{phase}_gib" in measured]
        return {f"memory/{phase}_predicted_gib": self._predicted[phase] / 2**30 for phase in phases}

    def _throughput(self, seconds: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        """Return the `perf/` metrics of a step."""
        work, num_ranks, num_trainers = self._work.take(), self._ranks.world_size, self._ranks.trainers.world_size
        # Colocated ranks do both, so then all of them count as samplers.
        num_samplers = num_ranks - num_trainers or num_ranks
        whole, train = seconds["time/step_seconds"], seconds.get("time/train_seconds", 0.0)
        scoring, rollout = seconds.get("time/logprobs_seconds", 0.0), seconds.get("time/rollout_seconds", 0.0)
        metrics: dict[str, float] = {}
        if work.update_tokens and train:
            metrics["perf/tokens_per_second_per_rank"] = work.update_tokens / whole / num_ranks
            metrics["perf/train_tokens_per_second_per_rank"] = work.update_tokens / train / num_trainers
        if self._goes_on:
            # Sampling continues between steps, so it starts at the reshard and not at the begin of the phase.
            rollout = max(rollout, min(whole, scalars.get("perf/engines_open_seconds", 0.0)))
        if rollout and "rollout/sampled_tokens" in scalars:
            sampled = scalars["rollout/sampled_tokens"]
            metrics["perf/rollout_tokens_per_second_per_rank"] = sampled / rollout / num_samplers
        if work.flops and train + scoring:
            tflops = work.flops / (train + scoring) / num_trainers / 1e12
            metrics["perf/tflops_per_rank"] = tflops
            if self._peak_tflops is not None:
                metrics["perf/mfu"] = tflops / self._peak_tflops
        return metrics

    async def _ask_for_peak(self) -> None:
        """Fetch the peak performance of the ranks' devices, once. The smallest counts; None if a device is unknown."""
        if not self._knows_peak:
            peaks = await self._ranks.trainers.call("peak_tflops")
            self._peak_tflops = None if None in peaks else min(peaks)
            self._knows_peak = True


def idle_share(activities: Sequence[Activity], seconds: float) -> float:
    """Return the fraction of `seconds` in which ranks executed no call, as a mean over ranks."""
    busy = sum(activity.busy_seconds for activity in activities) / len(activities)
    # Calls are timed on the ranks and the step on the driver, so the share can be slightly outside [0, 1].
    return min(1.0, max(0.0, 1 - busy / seconds))


def peak_memory(activities: Sequence[Activity]) -> dict[str, float]:
    """Return `memory/PHASE_gib`, the largest peak of any rank in each phase of a step."""
    found: dict[str, float] = {}
    for activity in activities:
        for method, num_bytes in activity.peak_bytes.items():
            if (phase := _PHASES.get(method.rpartition(".")[2])) is not None:
                name = f"memory/{phase}_gib"
                found[name] = max(found.get(name, 0.0), num_bytes / 2**30)
    return found
