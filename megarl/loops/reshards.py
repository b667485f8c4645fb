"""The reshards of a run: with all ranks waiting, or beside the next step's training."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from megarl.cluster.replacements import Replacements
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.loops.performance import Performance
from megarl.platform.spans import span
from megarl.rollout.pool import EnginePool

METRICS = {
    "time/reshard_STAGE_seconds": (
        "seconds",
        "a stage of the reshard on the slowest rank: meet (wait for the last rank; with weights.overlap until the "
        "engines have paused), pack, wire, local, unpack, quantise, total, verify",
    ),
    "time/reshard_hidden_seconds": (
        "seconds",
        "under weights.overlap: how long the trainer worked while the weights went to the engines",
    ),
    "time/reshard_waited_seconds": (
        "seconds",
        "under weights.overlap, of the reshard: how long the trainer waited for the step before's, still under way",
    ),
    "perf/engine_pause_seconds": (
        "seconds",
        "how long separate engines sampled nothing for a reshard: coming to rest, and receiving the weights",
    ),
    "rollout/replicas": ("count", "separate engines that sample after the step's reshard"),
    "rollout/lost_requests": (
        "count",
        "requests of the step whose separate engine was lost, which others took over with the tokens that were kept",
    ),
    "reshard/KIND_bytes": ("bytes", "bytes of all ranks that the reshard moved so"),
    "reshard/probe_gap": (
        "nats",
        "distance of log-probs of an engine that converts its weights from the trainer's, where they are compared",
    ),
}
"""Names, units and meanings, for `tracking.table`. Those of a reshard beside a step are in that step's line."""

Reports = Sequence[Mapping[str, float]]
"""Seconds and bytes of a reshard, by rank."""


class Reshards:
    """Moves the trainer's weights into the engines after a step; `performance` measures the steps."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: RunRanks,
        replacements: Replacements,
        pool: EnginePool,
        performance: Performance,
    ) -> None:
        """`replacements` are separate engine replicas that were lost and have started again."""
        self._recipe, self._ranks, self._replacements = recipe, ranks, replacements
        self._pool, self._performance = pool, performance
        self._under_way: asyncio.Task[dict[str, float]] | None = None
        self._reports: Reports = ()
        """Of the engines, of the one that is under way."""

    async def run(self, step: int) -> dict[str, float]:
        """Reshard. Returns the slowest rank's seconds and the bytes of all, with those of one that was under way.

        Requests that run in separate engines wait meanwhile, and go on under the new weights. `reshard/probe_gap`: how
        far the log-probs of engines that convert their weights are, where they are compared.
        """
        before = await self.finish()
        if self._ranks.is_separate:
            reports, pause = await self._run_separate(step)
        else:
            verify = self._is_verified(step)
            reports, pause = await self._ranks.call("reshard", verify=verify, version=step + 1), {}
        self._pool.release()
        return _with_earlier(before, _measured(reports) | pause)

    async def begin(self, step: int) -> dict[str, float]:
        """Begin to reshard beside the next step, where the recipe has it so; else `run`.

        When this returns, the trainers have copies of their weights and the engines have paused, so that all that they
        sampled is counted in this step. They have the weights at the latest after `finish`. Returns what was measured
        of the reshard that was under way before, if any, or what `run` does.
        """
        before = await self.finish()
        # Who comes back needs a new bridge, which the trainers are needed for.
        can_overlap = self._ranks.is_bridged and not self._replacements.has_started
        if not (self._recipe.overlaps_at(step) and can_overlap):
            return _with_earlier(before, await self.run(step))
        begun = asyncio.get_running_loop().create_future()
        self._under_way = asyncio.create_task(self._send(step, begun))
        await asyncio.wait([self._under_way, begun], return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            self._under_way.result()
        return before

    async def finish(self) -> dict[str, float]:
        """Wait until the engines have the weights that are under way to them; what was measured of that, if any are."""
        if self._under_way is None:
            return {}
        began = time.monotonic()
        with span("finish reshard"):
            metrics = await self._under_way
            of_trainers = await self._ranks.finish_send()
        self._under_way = None
        return (
            metrics
            | _measured([*of_trainers, *self._reports])
            | {"time/reshard_waited_seconds": time.monotonic() - began}
        )

    async def close(self) -> None:
        """Give up what is under way."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)

    def _is_verified(self, step: int) -> bool:
        every = self._recipe.weights.verify_every
        return every > 0 and step % every == 0

    async def _run_separate(self, step: int) -> tuple[Reports, dict[str, float]]:
        """Each rank's report of a reshard to engines that are brought to rest for it, and what is measured of those.

        Replicas that have started again sample from then on.
        """
        began = time.monotonic()
        with span("hold engines"):
            await self._pool.hold(parks=self._recipe.rollout.recompute_kv)
        # A replica that was lost and one that takes its place are two: what rests in the first goes to the others.
        self._pool.settle(self._leaders)
        self._ranks.add(self._replacements.take())
        reports = await self._ranks.reshard(self._is_verified(step), step + 1)
        return reports, self._settled(began)

    async def _send(self, step: int, begun: asyncio.Future[None]) -> dict[str, float]:
        """Reshard from copies of the trainers' weights; returns what was measured.

        `begun` is done when the trainers have the copies and the engines have paused.
        """
        began = time.monotonic()
        worked_before = 0.0

        def tell() -> None:
            nonlocal worked_before
            worked_before = self._ranks.trainers.seconds_in_calls
            holding.add_done_callback(let_go)

        def let_go(holding: asyncio.Task[None]) -> None:
            # A hold that failed fails the send, and with it whoever waits for both.
            if not holding.cancelled() and holding.exception() is None and not begun.done():
                begun.set_result(None)

        # Asked later, engines would answer only when they have the weights, and the step's end would wait for that.
        asked = self._performance.ask_engines()
        holding = asyncio.create_task(self._pool.hold(parks=self._recipe.rollout.recompute_kv))
        resting = asyncio.gather(holding, asyncio.wait([asked]))
        try:
            self._reports = await self._ranks.send(self._is_verified(step), step + 1, resting, tell)
            metrics = self._settled(began)
        except Exception as error:
            # Who waits for a completion would wait for ever.
            self._pool.fail(error)
            raise
        finally:
            resting.cancel()
            await asyncio.gather(resting, return_exceptions=True)
        self._pool.release()
        return metrics | {"time/reshard_hidden_seconds": self._ranks.trainers.seconds_in_calls - worked_before}

    def _settled(self, began: float) -> dict[str, float]:
        """Have the engines that have the weights sample, once the pool is released; what was measured of them."""
        self._pool.settle(self._leaders)
        return {
            "perf/engine_pause_seconds": time.monotonic() - began,
            "rollout/replicas": float(len(self._ranks.replicas)),
            "rollout/lost_requests": float(self._pool.take_lost()),
        }

    @property
    def _leaders(self) -> set[int]:
        """The first ranks of the separate engine replicas that are there."""
        return {group.part.first_rank for group in self._ranks.replicas}


def _measured(reports: Reports) -> dict[str, float]:
    """The slowest rank's seconds by stage, and the bytes of all."""
    # Ranks that only sample have a stage that those that only train have not.
    stages = dict.fromkeys(name for r in reports for name in r if name.endswith("_seconds"))
    seconds = {f"time/reshard_{name}": max(r.get(name, 0.0) for r in reports) for name in stages}
    moved = {f"reshard/{name}": float(sum(r[name] for r in reports)) for name in reports[0] if name.endswith("_bytes")}
    gaps = {"reshard/probe_gap": max(r["probe_gap"] for r in reports)} if "probe_gap" in reports[0] else {}
    return seconds | moved | gaps


def _with_earlier(earlier: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of two reshards whose ends are in one step: their sums, but the replicas of the later one."""
    total = Counter(earlier)
    total.update(metrics)
    return {**total, "rollout/replicas": metrics["rollout/replicas"]} if earlier else dict(metrics)
