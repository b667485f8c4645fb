"""Throughput, utilisation and memory of a step, from what ranks and driver noted of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from megarl.cluster.activity import Activity
from megarl.cluster.batching import RankModel
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.tracking.metrics import Metric, merge, values

METRICS = {
    "perf/tokens_per_second_per_rank": (
        "tokens/s",
        "tokens that the step's updates were made on, prompts included, by its time and the number of ranks (GPUs, on "
        "a CPU processes)",
    ),
    "perf/train_tokens_per_second_per_rank": (
        "tokens/s",
        "the same by the time of the phase train alone and the ranks that train",
    ),
    "perf/rollout_tokens_per_second_per_rank": (
        "tokens/s",
        "sampled tokens by the time of the phase rollout and the ranks that sample; where attempts go on from step to "
        "step (rollout.stragglers, max_staleness) by perf/engines_open_seconds",
    ),
    "perf/tflops_per_rank": (
        "TFLOP/s",
        "model FLOPs of the step's updates and scoring passes by the ranks that train and the time of the phases "
        "train, logprobs",
    ),
    "perf/mfu": (
        "share",
        "model FLOPs utilisation: perf/tflops_per_rank by the device's peak (cluster.peak_tflops, or a known GPU's)",
    ),
    "time/ranks_idle": ("share", "the step's time in which ranks carried out no call of the driver, mean over ranks"),
    "time/trainers_idle": (
        "share",
        "the same of the ranks that train, where others sample (rollout.placement separate)",
    ),
    "memory/PHASE_gib": (
        "GiB",
        "most memory in use in a phase, of the rank with the most: the device's, on a CPU the process's; scoring "
        "passes of an evaluation count as logprobs",
    ),
    "memory/PHASE_predicted_gib": (
        "GiB",
        "the same as `megarl plan` computes it before a start, of the phases that were measured",
    ),
}
"""Names, units and meanings, for `tracking.table`."""

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
"""The phase that a call of the ranks belongs to, of a model's by its method: `policy.update` by `update`."""
_OfEngines = tuple[list[Activity], list[dict[str, Metric]]]
"""Activities of separate engines' ranks, and metrics of all engines, since they were asked before."""


class Performance:
    """Measures the steps of a run. Metrics: METRICS, and those of the engines."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: RunRanks,
        models: Mapping[str, RankModel],
        predicted: Mapping[str, int] | None = None,
    ) -> None:
        """`predicted` are the bytes of the fullest rank by phase, as planned."""
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
        """A step begins: what was before the first, the start and its evaluation, is no step's."""
        if not self._has_begun:
            self._has_begun = True
            await self._ranks.call("__activity__")
            await self._ranks.call_engines("engine_metrics")
            self._work.take()
            self._first_began = time.monotonic()

    def ask_engines(self) -> asyncio.Future[_OfEngines]:
        """Ask the engines now for what the next `of_step` tells of them; left out, it does so itself."""

        async def ask() -> _OfEngines:
            activities = await self._ranks.call_engines("__activity__") if self._ranks.is_separate else []
            return activities, await self._ranks.call_engines("engine_metrics")

        self._asked = asyncio.ensure_future(ask())
        # Its error is raised by `of_step`; a run that ends before has another one to tell.
        self._asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        return self._asked

    async def of_step(self, seconds: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        """Of the time since the call before; `seconds` are the step's times and `scalars` its metrics."""
        if self._first_began is not None:
            # The time of a run's first step is counted from the run's start.
            own = time.monotonic() - self._first_began
            seconds = {**seconds, "time/step_seconds": min(own, seconds["time/step_seconds"])}
            self._first_began = None
        await self._ask_for_peak()
        activities: list[Activity] = await self._ranks.trainers.call("__activity__")
        asked, self._asked = self._asked or self.ask_engines(), None
        of_engines, found = await asked
        activities += of_engines
        engines = values(merge(found))
        whole = max(seconds["time/step_seconds"], 1e-9)
        memory = peak_memory(activities)
        metrics = engines | memory | self._planned(memory) | {"time/ranks_idle": idle_share(activities, whole)}
        if self._ranks.is_separate:
            metrics["time/trainers_idle"] = idle_share(activities[: self._ranks.trainers.world_size], whole)
        return metrics | self._throughput(seconds, scalars)

    def _planned(self, measured: Mapping[str, float]) -> dict[str, float]:
        """`memory/PHASE_predicted_gib` of the phases whose memory was measured."""
        phases = [phase for phase in self._predicted if f"memory/{phase}_gib" in measured]
        return {f"memory/{phase}_predicted_gib": self._predicted[phase] / 2**30 for phase in phases}

    def _throughput(self, seconds: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        work, num_ranks, num_trainers = self._work.take(), self._ranks.world_size, self._ranks.trainers.world_size
        num_samplers = num_ranks - num_trainers or num_ranks
        whole, train = seconds["time/step_seconds"], seconds.get("time/train_seconds", 0.0)
        scoring, rollout = seconds.get("time/logprobs_seconds", 0.0), seconds.get("time/rollout_seconds", 0.0)
        metrics: dict[str, float] = {}
        if work.update_tokens and train:
            metrics["perf/tokens_per_second_per_rank"] = work.update_tokens / whole / num_ranks
            metrics["perf/train_tokens_per_second_per_rank"] = work.update_tokens / train / num_trainers
        if self._goes_on:
            # They are sampled from the reshard on, before the phase begins.
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
        """Ask the ranks for their devices' peak, once: the least counts; where one is not known, there is none."""
        if not self._knows_peak:
            peaks = await self._ranks.trainers.call("peak_tflops")
            self._peak_tflops = None if None in peaks else min(peaks)
            self._knows_peak = True


def idle_share(activities: Sequence[Activity], seconds: float) -> float:
    """The share of a time in which ranks carried out no call, mean over ranks."""
    busy = sum(activity.busy_seconds for activity in activities) / len(activities)
    return min(1.0, max(0.0, 1 - busy / seconds))


def peak_memory(activities: Sequence[Activity]) -> dict[str, float]:
    """`memory/PHASE_gib` of the calls that ranks carried out."""
    found: dict[str, float] = {}
    for activity in activities:
        for method, num_bytes in activity.peak_bytes.items():
            if (phase := _PHASES.get(method.rpartition(".")[2])) is not None:
                name = f"memory/{phase}_gib"
                found[name] = max(found.get(name, 0.0), num_bytes / 2**30)
    return found
