"""Requests that rest in their engine over an update of the weights and go on over the old keys and values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.rollout.pool import EnginePool
from megarl.types import Completion, PeerLostError, Request, SamplingSettings
from tests.rollout.engines import engines

ONE, TWO = ParallelConfig(1, 1, 1, 1), ParallelConfig(1, 1, 2, 1)
PROMPT = tuple(range(5, 69))
"""Two blocks of the cache."""
STEPS, TOKENS = 12, 48


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model(num_layers=2, initializer_range=0.1))


@pytest.fixture(scope="module")
async def group(model_path: str, distributed_tier: None) -> AsyncIterator[WorkerGroup]:
    """One engine."""
    async with engines(model_path, 1, recompute_kv=False) as made:
        yield made


class HeldAfter:
    """The engines, at rest once the first of them has made so many steps, one in each call."""

    def __init__(self, group: WorkerGroup, parallel: ParallelConfig, steps: int) -> None:
        self._group, self._left = group, steps
        self.sent: list[Request] = []
        self.at_rest = asyncio.Event()
        self.lost: set[int] = set()
        self.pool = EnginePool(self, parallel, max_running=32, budget_seconds=0.0)

    async def ask(self, ranks: Any, method: str, per_rank: Any, *args: Any, budget_seconds: float = 0.0) -> list[Any]:
        if method == "advance":
            (new, _), *_ = per_rank
            self.sent += new
        if self.lost.intersection(ranks):
            raise PeerLostError("gone")
        answers = await self._group.ask(ranks, method, per_rank, *args, budget_seconds=budget_seconds)
        if ranks[0] == 0 and method == "advance":
            self._left -= 1
            if self._left == 0:
                self._holding = asyncio.create_task(self._hold())
        return answers

    async def _hold(self) -> None:
        await self.pool.pause(aborts=False)
        self.at_rest.set()


def request(seed: int) -> Request:
    # The cache has no blocks in common with another test's.
    return Request(f"{seed}", np.array([seed, *PROMPT], np.int32), SamplingSettings(TOKENS, 1.0), seed)


async def whole_ones(group: WorkerGroup, count: int) -> list[tuple[Request, Completion]]:
    """Requests all of whose tokens come, under the weights as they are."""
    pool = EnginePool(group, ONE, max_running=32)
    asked = [request(seed) for seed in range(40)]
    found = await asyncio.gather(*map(pool.generate, asked))
    chosen = [(one, done) for one, done in zip(asked, found, strict=True) if len(done.token_ids) == TOKENS]
    assert len(chosen) >= count
    return chosen[:count]


async def mismatches(group: WorkerGroup, asked: Request, done: Completion) -> np.ndarray:
    """Distances of a completion's log-probs from those of a pass over all of it with the weights as they are."""
    tokens = [*asked.prompt_token_ids.tolist(), *done.token_ids.tolist()]
    [scores, *_] = await group.call("logprobs", tokens)
    return np.abs(scores[len(asked.prompt_token_ids) :] - done.rollout_logprobs)


async def test_it_goes_on_over_the_old_keys_and_later_requests_do_not(group: WorkerGroup) -> None:
    await group.call("update", 1.0)
    plain = await whole_ones(group, 3)
    ranks = HeldAfter(group, ONE, STEPS)
    generating = [asyncio.create_task(ranks.pool.generate(one)) for one, _ in plain]
    await ranks.at_rest.wait()
    assert await group.call("unfinished") == [3] and not any(task.done() for task in generating)
    # What is sampled is known at once, and counted once.
    assert ranks.pool.metrics()["rollout/sampled_tokens"] == 3 * STEPS
    version = int(plain[0][1].weight_versions[0])
    await group.call("update", 0.97)
    ranks.pool.resume()
    found = await asyncio.gather(*generating)
    num_later = sum(len(done.token_ids) for done in found) - 3 * STEPS
    assert ranks.pool.metrics()["rollout/sampled_tokens"] == num_later
    assert len(ranks.sent) == 3
    pool, (first, _) = EnginePool(group, ONE, max_running=32), plain[0]
    later, again = await pool.generate(first), await pool.generate(first)
    assert (later.num_cached, again.num_cached) == (0, len(PROMPT))
    for (asked, before), done in zip(plain, found, strict=True):
        num_new = len(done.token_ids) - STEPS
        assert num_new > 0
        assert done.weight_versions.tolist() == [version] * STEPS + [version + 1] * num_new
        assert done.token_ids[:STEPS].tolist() == before.token_ids[:STEPS].tolist()
        np.testing.assert_allclose(done.rollout_logprobs[:STEPS], before.rollout_logprobs[:STEPS], atol=1e-5)
        # No version's: the new weights, over what the old ones left.
        assert (await mismatches(group, asked, done))[STEPS:].max() > 1e-3
    assert (await mismatches(group, first, later)).max() <= 1e-5 and (
        await mismatches(group, first, again)
    ).max() <= 1e-5


@pytest.mark.distributed
async def test_a_request_that_has_not_begun_is_the_new_weights_own(model_path: str) -> None:
    """It waits in the engine for its only slot, and has a prompt in common with what runs there."""
    async with engines(model_path, 1, recompute_kv=False, slots=1) as group:
        await group.call("update", 1.0)
        [(first, done)] = await whole_ones(group, 1)
        version = int(done.weight_versions[0])
        second = replace(first, request_id="second", seed=first.seed + 1)
        ranks = HeldAfter(group, ONE, STEPS)
        generating = [asyncio.create_task(ranks.pool.generate(one)) for one in (first, second)]
        await ranks.at_rest.wait()
        assert await group.call("unfinished") == [2]
        await group.call("update", 0.97)
        ranks.pool.resume()
        interrupted, waited = await asyncio.gather(*generating)
        assert set(interrupted.weight_versions.tolist()) == {version, version + 1}
        assert set(waited.weight_versions.tolist()) == {version + 1} and waited.num_cached == 0
        assert (await mismatches(group, second, waited)).max() <= 1e-5


@pytest.mark.distributed
async def test_what_rests_in_an_engine_that_is_lost_meanwhile_is_sampled_by_another(model_path: str) -> None:
    async with engines(model_path, 2, recompute_kv=False) as group:
        ranks = HeldAfter(group, TWO, 3)
        asked = [request(seed) for seed in range(6)]
        generating = [asyncio.create_task(ranks.pool.generate(one)) for one in asked]
        await ranks.at_rest.wait()
        num_resting, *_ = await group.call("unfinished")
        [lost, resting] = await group.scatter("sampled_so_far", [None, None])
        # On a busy machine the second engine may have ended some before the first has made its steps.
        num_ended = sum(len(task.result().token_ids) for task in generating if task.done())
        num_resting_tokens = sum(lost.values()) + sum(resting.values())
        assert ranks.pool.metrics()["rollout/sampled_tokens"] == num_resting_tokens + num_ended
        ranks.lost = {0}
        ranks.pool.set_live_replicas({1})
        assert num_resting > 0 and ranks.pool.take_lost() == num_resting
        ranks.pool.resume()
        found = await asyncio.gather(*generating)
        assert [done.request_id for done in found] == [one.request_id for one in asked]
        assert len(ranks.sent) == len(asked) + num_resting
        # What the lost one had is sampled twice.
        num_later = sum(len(done.token_ids) for done in found) - sum(resting.values()) - num_ended
        assert ranks.pool.metrics()["rollout/sampled_tokens"] == num_later
