"""A reshard in the background of the next step: waits of the driver, measurements and failures."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.loops.observers.weight_checks import WeightChecks
from megarl.loops.reshard_schedule import ReshardSchedule
from megarl.reshard.reshard_report import ReshardReport
from megarl.rollout import pool_meter
from megarl.rollout.pool import EnginePool
from megarl.types import MegarlError, Request, SamplingSettings

LAYOUT = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1, rollout_ranks=1)
REPORT = ReshardReport(seconds={"wire": 0.5}, num_bytes={"sent": 8})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Ranks:
    """A trainer, an engine and the reshard between them. The test decides when calls end."""

    def __init__(self) -> None:
        self.is_separate = self.is_connected = True
        self.trainers = SimpleNamespace(seconds_in_calls=0.0)
        self.replicas = [SimpleNamespace(part=SimpleNamespace(first_rank=1))]
        self.sending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.are_engines_paused = asyncio.Event()
        self.calls: list[tuple[str, bool, int]] = []
        self.answers: defaultdict[str, asyncio.Future[Any]] = defaultdict(asyncio.get_running_loop().create_future)
        self.has_copies = asyncio.Event()

    async def ask(self, ranks: Sequence[int], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [await self.answers[method]]

    async def run_overlapping(
        self, verify: bool, version: int, engines_paused: Awaitable[object], on_copied: Callable[[], object]
    ) -> list[ReshardReport]:
        self.calls.append(("send", verify, version))
        on_copied()
        self.has_copies.set()
        await engines_paused
        self.are_engines_paused.set()
        await self.sending
        return [REPORT]

    async def collect_reports(self) -> list[ReshardReport]:
        return [replace(REPORT, seconds={"wire": 0.7})]

    async def run(self, verify: bool, version: int) -> list[ReshardReport]:
        self.calls.append(("reshard", verify, version))
        return [REPORT] * 2

    def add(self, groups: Sequence[Any]) -> None:
        assert not groups


class Run:
    def __init__(self, **rollout: Any) -> None:
        recipe = Recipe.model_validate(
            {
                "name": "r",
                "loop": "rl",
                "model": {"path": "m"},
                "data": {"train": "t", "validation": {"held": "t"}},
                "rollout": {"placement": "separate", "ranks": 1, "max_staleness": 1, **rollout},
                "evaluation": {"every_steps": 3},
                "weights": {"overlap": True, "verify_every": 2},
                "train": {"steps": 10},
            }
        )
        self.ranks, self.asked = Ranks(), 0
        self.replacements = SimpleNamespace(has_started=False, take=list)
        self.pool = EnginePool(self.ranks, LAYOUT, max_running=1)
        checks = WeightChecks(recipe, self.ranks, None)  # type: ignore[arg-type]
        self.reshard_schedule = ReshardSchedule(
            recipe, self.ranks, self.ranks, self.replacements, self.pool, self, checks
        )  # type: ignore[arg-type]

    def ask_engines(self) -> asyncio.Future[None]:
        self.asked += 1
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def sampling(self) -> asyncio.Task[Any]:
        """A request that waits for the engine."""
        asked = Request("a", np.array([1], np.int32), SamplingSettings(4, 1.0), 0)
        return asyncio.create_task(self.pool.generate(asked))


async def test_the_next_step_begins_while_the_weights_are_under_way() -> None:
    run = Run()
    assert await run.reshard_schedule.begin_reshard(1) == {}
    await run.ranks.are_engines_paused.wait()
    assert run.pool.is_paused and run.asked == 1 and run.ranks.calls == [("send", False, 2)]
    run.ranks.trainers.seconds_in_calls = 4.0
    waiting = asyncio.create_task(run.reshard_schedule.begin_reshard(2))
    await asyncio.sleep(0)
    assert not waiting.done() and len(run.ranks.calls) == 1
    run.ranks.sending.set_result(None)
    found = await waiting
    assert found["time/reshard_hidden_seconds"] == 4.0 and found["time/reshard_waited_seconds"] > 0
    assert found["time/reshard_wire_seconds"] == 0.7 and found["reshard/sent_bytes"] == 16.0
    assert found["rollout/replicas"] == 1 and found["perf/engine_pause_seconds"] > 0
    assert run.ranks.calls[1:] == [("send", True, 3)]
    await run.reshard_schedule.finish_reshard()
    assert not run.pool.is_paused


@pytest.mark.parametrize(
    ("step", "reason"),
    [(3, "it evaluates"), (10, "it is the last"), (1, "lost"), (1, "restarted")],
)
async def test_where_the_engines_are_needed_next_the_trainer_waits(step: int, reason: str) -> None:
    run = Run()
    run.ranks.is_connected = reason != "lost"
    run.replacements.has_started = reason == "restarted"
    found = await run.reshard_schedule.begin_reshard(step)
    assert run.ranks.calls == [("reshard", step % 2 == 0, step + 1)] and not run.pool.is_paused
    assert "time/reshard_hidden_seconds" not in found


async def test_two_reshards_that_end_flatten_step_are_counted_together() -> None:
    run = Run()
    await run.reshard_schedule.begin_reshard(2)
    run.ranks.sending.set_result(None)
    found = await run.reshard_schedule.begin_reshard(3)
    assert found["reshard/sent_bytes"] == 32.0 and found["rollout/replicas"] == 1


async def test_tokens_that_stay_in_an_engine_are_counted_in_the_step_of_its_reshard() -> None:
    """The step's metrics are taken when `begin` returns: no sooner than the engine has said what it sampled."""
    run = Run(recompute_kv=False)
    sampling = run.sampling()
    while "advance" not in run.ranks.answers:
        await asyncio.sleep(0)
    beginning = asyncio.create_task(run.reshard_schedule.begin_reshard(1))
    await run.ranks.has_copies.wait()
    run.ranks.answers["advance"].set_result([])
    while "sampled_so_far" not in run.ranks.answers:
        await asyncio.sleep(0)
    assert not beginning.done()
    run.ranks.answers["sampled_so_far"].set_result({"a": 3})
    await beginning
    assert run.pool.metrics()["rollout/sampled_tokens"] == 3
    sampling.cancel()
    await run.reshard_schedule.close()


async def test_who_waits_for_a_sample_is_notified_that_the_weights_did_not_arrive() -> None:
    run = Run()
    await run.reshard_schedule.begin_reshard(1)
    await run.ranks.are_engines_paused.wait()
    sampling = run.sampling()
    run.ranks.sending.set_exception(MegarlError("lost"))
    with pytest.raises(MegarlError, match="lost"):
        await sampling
    with pytest.raises(MegarlError, match="lost"):
        await run.reshard_schedule.finish_reshard()
    await run.reshard_schedule.close()


async def test_a_pool_that_is_held_at_a_step_s_end_counts_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pool_meter, "time", clock)
    run = Run()
    clock.now = 10.0
    await run.pool.pause()
    sampling = run.sampling()
    await asyncio.sleep(0)
    clock.now = 13.0
    of_step = run.pool.metrics()
    assert (of_step["perf/engines_open_seconds"], of_step["rollout/paused_seconds"]) == (10.0, 3.0)
    clock.now = 15.0
    run.pool.resume()
    clock.now = 16.0
    of_step = run.pool.metrics()
    assert (of_step["perf/engines_open_seconds"], of_step["rollout/paused_seconds"]) == (1.0, 2.0)
    assert run.pool.seconds_paused == 5.0
    sampling.cancel()
