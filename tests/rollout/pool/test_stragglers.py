"""Replicas that are far slower than their siblings: by numbers, and a real engine that is stopped again and again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from megarl.config.parallel import ParallelConfig
from megarl.rollout.pool import EnginePool
from megarl.rollout.stragglers import MIN_STEPS, WINDOW, Pace, StragglerDetector
from megarl.types import Request, SamplingSettings
from tests.child_processes import rank_processes
from tools.local_group import LocalGroup

FAST = Pace(num_tokens=4000, seconds=10.0, request_seconds=80.0)
RUNNING_SECONDS = 0.01
STOPPED_PER_RUNNING = 10.0


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model(num_layers=2, tie_word_embeddings=False, initializer_range=0.1))


def judged(reported: list[str], steps: int, **paces: Pace) -> tuple[StragglerDetector, float]:
    """Who judged so many steps alike, and the last number."""
    detector = StragglerDetector(reported.append)
    detector.metrics(paces)  # the first is no one's fault
    found = [detector.metrics(paces)["rollout/slow_replicas"] for _ in range(steps)]
    return detector, found[-1]


def test_who_is_slow_is_reported_once_with_numbers_and_counted_while_it_lasts() -> None:
    reported: list[str] = []
    paces = {
        "a": FAST,
        "b": Pace(num_tokens=1000, seconds=10.0, request_seconds=80.0),
        "c": FAST,
        "d": Pace(num_tokens=4400, seconds=10.0, request_seconds=80.0),
    }
    _, number = judged(reported, MIN_STEPS - 1, **paces)
    assert number == 0 and not reported
    detector, number = judged(reported, MIN_STEPS, **paces)
    assert number == 1
    [line] = reported
    assert line.startswith("b is slow: over 3 steps it sampled 100 tokens/s, 12.5 for each request; the median of its ")
    assert "siblings is 400 and 50 " in line
    for _ in range(WINDOW):
        number = detector.metrics({**paces, "b": FAST})["rollout/slow_replicas"]
    assert number == 0
    for _ in range(WINDOW):
        number = detector.metrics(paces)["rollout/slow_replicas"]
    assert number == 1 and len(reported) == 1
    # Another process in its place is judged by what it does itself.
    detector.forget("b")
    assert [detector.metrics(paces)["rollout/slow_replicas"] for _ in range(MIN_STEPS + 1)] == [0.0] * MIN_STEPS + [1.0]
    assert len(reported) == 2


@pytest.mark.parametrize(
    "pace",
    [
        pytest.param(Pace(num_tokens=500, seconds=10.0, request_seconds=10.0), id="one long request, at full speed"),
        pytest.param(Pace(num_tokens=6000, seconds=10.0, request_seconds=320.0), id="four times as many, each slower"),
        pytest.param(Pace(num_tokens=2100, seconds=10.0, request_seconds=80.0), id="half as fast"),
        pytest.param(Pace(num_tokens=10, seconds=1.0, request_seconds=8.0), id="too few samples"),
        pytest.param(Pace(), id="nothing to do"),
    ],
)
def test_load_is_no_slowness(pace: Pace) -> None:
    reported: list[str] = []
    assert judged(reported, WINDOW, a=FAST, b=pace)[1] == 0 and not reported


def test_without_siblings_nobody_is_slow() -> None:
    assert judged([], WINDOW, a=Pace(num_tokens=1, seconds=10.0, request_seconds=80.0))[1] == 0


@contextlib.asynccontextmanager
async def stopped_again_and_again(rank: int) -> AsyncIterator[None]:
    """Within, a rank's process runs for a small part of the time only."""
    process = rank_processes(os.getpid())[rank]

    async def stop() -> None:
        ran = RUNNING_SECONDS
        while True:
            os.kill(process, signal.SIGSTOP)
            # On a busy machine this process too gets its turn late.
            await asyncio.sleep(STOPPED_PER_RUNNING * ran)
            os.kill(process, signal.SIGCONT)
            began = time.monotonic()
            await asyncio.sleep(RUNNING_SECONDS)
            ran = time.monotonic() - began

    stopping = asyncio.create_task(stop())
    try:
        yield
    finally:
        stopping.cancel()
        await asyncio.wait([stopping])
        os.kill(process, signal.SIGCONT)


@pytest.mark.long
async def test_an_engine_that_is_mostly_stopped_is_named(group: LocalGroup) -> None:
    reported: list[str] = []
    pool = EnginePool(
        group, ParallelConfig(1, 1, 2, 1), max_running=16, budget_seconds=0.1,
        stragglers=StragglerDetector(reported.append, min_seconds=0.0),
    )  # fmt: skip

    async def step() -> float:
        requests = [
            Request(f"{number}", np.array([5, 17, number], np.int32), SamplingSettings(40), number)
            for number in range(16)
        ]
        await asyncio.gather(*map(pool.generate, requests))
        return pool.metrics()["rollout/slow_replicas"]

    await step()
    async with stopped_again_and_again(1):
        found = [await step() for _ in range(WINDOW)]
    assert found[0] == 0 and found[-1] == 1
    [line] = reported
    assert line.startswith("the engine of rank 1 is slow: over 3 steps it sampled ")
