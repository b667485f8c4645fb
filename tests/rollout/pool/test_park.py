"""Requests that are parked over an update of the weights: what is kept, what is asked again, what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoTokenizer

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.rollout.pool import EnginePool
from megarl.rollout.requests.engine_requests import join_parts, make_remaining_request
from megarl.types import Completion, Request, RetainedSets, SamplingSettings
from tests.rollout.engines import engines

ONE = ParallelConfig(1, 1, 1, 1)


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model(family="qwen3_moe", num_layers=2, initializer_range=0.1))


@pytest.fixture(scope="module")
async def group(model_path: str, distributed_tier: None) -> AsyncIterator[WorkerGroup]:
    """One engine, which tells what top-k kept."""
    async with engines(model_path, 1, top_k=5) as made:
        yield made


class HeldAfter:
    """Ranks of which a pool is held once they have made so many steps, one in each call.

    `sent` are the requests of each call, `parked` is set when the pool is at rest.
    """

    def __init__(self, group: WorkerGroup, steps: Sequence[int]) -> None:
        self._group, self._left, self._count = group, list(steps), 0
        self.sent: list[Request] = []
        self.parked = asyncio.Event()
        self.pool = EnginePool(self, ONE, max_running=32, budget_seconds=0.0)  # type: ignore[arg-type]
        self._holding: asyncio.Task[None] | None = None

    async def ask(self, ranks: Any, method: str, per_rank: Any, *args: Any, budget_seconds: float) -> list[Any]:
        (new, aborts), *_ = per_rank
        self.sent += new
        answers = await self._group.ask(ranks, method, per_rank, *args, budget_seconds=budget_seconds)
        self._count += not aborts
        if self._left and self._count == self._left[0]:
            del self._left[0]
            self._holding = asyncio.create_task(self._hold())
        return answers

    async def _hold(self) -> None:
        await self.pool.pause()
        self.parked.set()


def request(name: str, prompt: Sequence[int], tokens: int, seed: int = 0, stop: tuple[str, ...] = ()) -> Request:
    return Request(name, np.array(prompt, np.int32), SamplingSettings(tokens, 1.0, stop=stop), seed)


async def updated(group: WorkerGroup, scale: float) -> None:
    await group.call("update", scale)


async def whole(group: WorkerGroup, asked: Sequence[Request]) -> dict[str, Completion]:
    """The completions of requests whose tokens all come."""
    pool = EnginePool(group, ONE, max_running=32)
    found = await asyncio.gather(*map(pool.generate, asked))
    return {completion.request_id: completion for completion in found}


async def scored(group: WorkerGroup, asked: Request, completion: Completion) -> NDArray[np.float32]:
    """Log-probs of a completion under the engines' weights."""
    tokens = [*asked.prompt_token_ids.tolist(), *completion.token_ids.tolist()]
    return (await group.call("logprobs", tokens))[0][len(asked.prompt_token_ids) :]


async def asked_of(group: WorkerGroup, tokens: int, count: int) -> list[Request]:
    """Requests all of whose tokens come under the first weights."""
    found = [request(f"{seed}", (7, 11, 13 + seed % 3), tokens, seed) for seed in range(40)]
    lengths = await whole(group, found)
    chosen = [one for one in found if len(lengths[one.request_id].token_ids) == tokens]
    assert len(chosen) >= count
    return chosen[:count]


async def test_a_completion_goes_on_under_new_weights_and_each_token_tells_its_own(group: WorkerGroup) -> None:
    await updated(group, 1.0)
    asked = await asked_of(group, 48, 3)
    plain = await whole(group, asked)
    ranks = HeldAfter(group, [12])
    generating = [asyncio.create_task(ranks.pool.generate(one)) for one in asked]
    await ranks.parked.wait()
    assert await group.call("unfinished") == [0]
    assert not any(task.done() for task in generating)
    scores = [await scored(group, one, plain[one.request_id]) for one in asked]
    version = int(plain[asked[0].request_id].weight_versions[0])
    await updated(group, 0.97)
    ranks.pool.resume()
    found = await asyncio.gather(*generating)
    again = ranks.sent[3:]
    assert [one.sampling.max_new_tokens for one in again] == [36] * 3 and [one.num_retained for one in again] == [
        12
    ] * 3
    assert not {one.seed for one in again} & {one.seed for one in asked}
    differs = 0
    for one, old, completion in zip(asked, scores, found, strict=True):
        assert completion.request_id == one.request_id
        num_new = len(completion.token_ids) - 12
        assert completion.weight_versions.tolist() == [version] * 12 + [version + 1] * num_new
        assert completion.token_ids[:12].tolist() == plain[one.request_id].token_ids[:12].tolist()
        np.testing.assert_allclose(completion.rollout_logprobs[:12], old[:12], atol=1e-5, rtol=0)
        new = await scored(group, one, completion)
        np.testing.assert_allclose(completion.rollout_logprobs[12:], new[12:], atol=1e-5, rtol=0)
        differs += np.abs(new[:12] - old[:12]).max() > 1e-3
        [experts] = await group.call("experts", completion.routed_experts.number)
        assert len(experts) == len(one.prompt_token_ids) + len(completion.token_ids) - 1
    assert differs == 3


async def test_a_completion_parked_twice_asks_for_what_is_left_and_no_more(group: WorkerGroup) -> None:
    await updated(group, 1.0)
    [asked] = await asked_of(group, 24, 1)
    ranks = HeldAfter(group, [10, 15, 19])
    generating = asyncio.create_task(ranks.pool.generate(asked))
    for _ in range(3):
        await ranks.parked.wait()
        ranks.parked.clear()
        ranks.pool.resume()
    found = await generating
    assert [one.sampling.max_new_tokens for one in ranks.sent] == [24, 14, 9, 5]
    assert len({one.seed for one in ranks.sent}) == 4
    assert found.finish_reason == ("length" if len(found.token_ids) == 24 else "stop")
    np.testing.assert_allclose(found.rollout_logprobs, await scored(group, asked, found), atol=1e-5, rtol=0)


async def test_a_request_that_is_parked_before_its_first_token_is_sampled_as_if_it_was_not(group: WorkerGroup) -> None:
    await updated(group, 1.0)
    asked = await asked_of(group, 8, 4)
    pool = EnginePool(group, ONE, max_running=2)
    await pool.pause()
    generating = [asyncio.create_task(pool.generate(one)) for one in asked]
    await asyncio.sleep(0)
    assert await group.call("unfinished") == [0]
    await pool.pause()
    cancelled = generating.pop()
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    pool.resume()
    found = await asyncio.gather(*generating)
    plain = await whole(group, asked[:3])
    assert [one.token_ids.tolist() for one in found] == [plain[one.request_id].token_ids.tolist() for one in asked[:3]]


async def test_a_stop_string_that_a_park_cuts_in_two_ends_the_completion(group: WorkerGroup, model_path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)

    async def parked_at_10(asked: Sequence[Request]) -> list[Completion]:
        ranks = HeldAfter(group, [10])
        generating = [asyncio.create_task(ranks.pool.generate(one)) for one in asked]
        await ranks.parked.wait()
        ranks.pool.resume()
        return await asyncio.gather(*generating)

    def text_over_the_park(completion: Completion) -> str | None:
        texts = [tokenizer.decode(completion.token_ids[:n], skip_special_tokens=True) for n in range(9, 12)]
        text = texts[2][len(texts[0]) :]
        is_cut = len(texts[0]) < len(texts[1]) < len(texts[2]) and "\ufffd" not in text
        return text if is_cut and texts[2].index(text) == len(texts[0]) else None

    await updated(group, 1.0)
    asked = [request(f"{seed}", (7, 11, 13 + seed % 3), 24, seed) for seed in range(32)]
    found = [completion for completion in await parked_at_10(asked) if len(completion.token_ids) > 12]
    stopped = []
    for completion in found:
        if stop := text_over_the_park(completion):
            seed = int(completion.request_id)
            stopped.append((request(f"{seed}", (7, 11, 13 + seed % 3), 24, seed, (stop,)), completion))
    assert stopped
    for (one, plain), completion in zip(stopped, await parked_at_10([one for one, _ in stopped]), strict=True):
        assert completion.request_id == one.request_id and completion.finish_reason == "stop"
        assert completion.token_ids.tolist() == plain.token_ids[:11].tolist()


async def test_what_top_k_kept_is_known_of_every_token_of_a_parked_completion(group: WorkerGroup) -> None:
    await updated(group, 1.0)
    asked = [replace(one, sampling=SamplingSettings(24, top_k=5)) for one in await asked_of(group, 24, 3)]
    plain = await whole(group, asked)
    ranks = HeldAfter(group, [10])
    generating = [asyncio.create_task(ranks.pool.generate(one)) for one in asked]
    await ranks.parked.wait()
    await updated(group, 0.97)
    ranks.pool.resume()
    found = await asyncio.gather(*generating)
    rests = await whole(group, ranks.sent[3:])
    for completion in found:
        sets, before, rest = completion.retained_sets, plain[completion.request_id], rests[completion.request_id]
        assert sets is not None and before.retained_sets is not None and rest.retained_sets is not None
        assert completion.token_ids[10:].tolist() == rest.token_ids.tolist()
        assert sets.counts.tolist() == [5] * len(completion.token_ids)
        assert sets.token_ids.tolist() == [*before.retained_sets.token_ids[:50], *rest.retained_sets.token_ids]
        assert all(
            token in kept for token, kept in zip(completion.token_ids, sets.token_ids.reshape(-1, 5), strict=True)
        )


def test_nothing_left_to_ask_for_is_length() -> None:
    asked = request("r", (1, 2), 3)
    parts = [
        Completion("r", np.array(ids), np.full(len(ids), -0.5, np.float32), "abort", np.full(len(ids), v, np.int32))
        for ids, v in (([5, 6], 1), ([7], 2))
    ]
    assert make_remaining_request(asked, []) is asked
    rest = make_remaining_request(asked, parts[:1])
    assert (rest.prompt_token_ids.tolist(), rest.sampling.max_new_tokens, rest.num_retained) == ([1, 2, 5, 6], 1, 2)
    assert rest.prompt_token_ids.dtype == np.int32 and rest.seed != asked.seed
    completion = join_parts(parts)
    assert completion.retained_sets is None
    assert completion.token_ids.tolist() == [5, 6, 7] and completion.weight_versions.tolist() == [1, 1, 2]
    kept = RetainedSets(np.array([2], np.int32), np.array([7, 9], np.int32))
    sets = join_parts([parts[0], replace(parts[1], retained_sets=kept)]).retained_sets
    assert sets is not None and (sets.counts.tolist(), sets.token_ids.tolist()) == ([0, 0, 2], [7, 9])
