"""The pool of engines, on real ones: who waits for whom, what is sampled in which company, and what is given up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.rewards.scoring.http_rewards import COUNTED_FOR
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.pool import AbandonedError, EnginePool, gather_unless_abandoned
from megarl.rollout.requests.engine_requests import PendingRequest
from megarl.types import Completion, PeerLostError, Request, SamplingSettings
from tests.rollout.engines import engines

ONE = ParallelConfig(1, 1, 1, 1)
TWO = ParallelConfig(1, 1, 2, 1)


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model(num_layers=2, tie_word_embeddings=False, initializer_range=0.1))


def request(name: str, prompt: tuple[int, ...], tokens: int, seed: int = 0) -> Request:
    return Request(name, np.array(prompt, np.int32), SamplingSettings(tokens, 1.0), seed)


async def long_one(pool: EnginePool, tokens: int) -> Request:
    """A request that is answered with so many tokens."""
    for seed in range(50):
        found = await pool.generate(request("probe", (7, 11, 13), tokens, seed))
        if len(found.token_ids) == tokens:
            return request("long", (7, 11, 13), tokens, seed)
    raise AssertionError("all end early")


async def sampled(group: WorkerGroup, parallel: ParallelConfig, order: list[int], max_running: int) -> dict[str, Any]:
    pool = EnginePool(group, parallel, max_running=max_running)
    asked = [request(f"{n}", (5 + n // 4, 17, 19), 6 + 5 * (n % 4), 100 + n) for n in range(40)]
    found = await asyncio.gather(*(pool.generate(asked[n]) for n in order))
    return {completion.request_id: completion for completion in found}


async def test_a_request_is_sampled_alike_by_any_engine_in_any_order(group: WorkerGroup) -> None:
    order = list(range(40))
    shuffled = random.Random(5).sample(order, 40)
    await group.call("seen")
    first = await sampled(group, ONE, order, 100)
    others = [await sampled(group, TWO, shuffled, 100), await sampled(group, TWO, shuffled, 3)]
    seen = await group.call("seen")
    assert len(first) == 40 and all(len(of_rank) > 20 for of_rank in seen)
    for other in others:
        assert other.keys() == first.keys()
        for name, completion in first.items():
            assert other[name].token_ids.tolist() == completion.token_ids.tolist()
            # Products of float32 with other numbers of rows differ in the last bits; this was 1.1e-6 once.
            np.testing.assert_allclose(other[name].rollout_logprobs, completion.rollout_logprobs, rtol=3e-6)


async def test_turns_on_one_engine_do_not_wait_for_a_long_completion_on_the_other(group: WorkerGroup) -> None:
    await group.call("seen")
    long = await long_one(EnginePool(group, ONE, max_running=8), 200)
    # A call a step: on a busy machine an engine that needs no driver for a second could be done first.
    pool = EnginePool(group, TWO, max_running=8, budget_seconds=0.0)
    await group.call("seen")
    running = asyncio.create_task(pool.generate(long))
    await asyncio.sleep(0)
    for turn in range(4):
        await pool.generate(request(f"turn{turn}", (5, 17, turn), 3), affinity="a")
        assert not running.done()
    assert len((await running).token_ids) == 200
    seen = await group.call("seen")
    assert [[name for name, _, _ in of_rank] for of_rank in seen] == [["long"], [f"turn{n}" for n in range(4)]]


class Noted:
    """Ranks, and how many completions each exchange with an engine may wait for."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.leaves: list[int | None] = []

    async def ask(
        self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *args: Any, budget_seconds: float = 0.0
    ) -> list[Any]:
        self.leaves.append(args[1])
        return await self._group.ask(ranks, method, per_rank, *args, budget_seconds=budget_seconds)


@pytest.mark.parametrize(
    ("are_last", "max_running", "least"),
    [((True,) * 16, 100, None), ((True,) * 15 + (False,), 100, 1), ((True,) * 16, 8, 1)],
    ids=["nothing follows", "a turn follows", "requests wait"],
)
async def test_the_driver_is_notified_at_once_only_where_a_request_may_follow(
    group: WorkerGroup, are_last: tuple[bool, ...], max_running: int, least: int | None
) -> None:
    noted = Noted(group)
    pool = EnginePool(noted, ONE, max_running=max_running)
    calls = [
        pool.generate(request(f"{n}", (5, 17), 2 + 5 * n, n), is_last=is_last) for n, is_last in enumerate(are_last)
    ]
    found = await asyncio.gather(*calls)
    assert [completion.request_id for completion in found] == [f"{n}" for n in range(16)]
    assert noted.leaves[0] == (None if least is None else max(least, min(16, max_running) // 8))


async def test_nothing_follows_the_last_turn_of_a_trajectory(group: WorkerGroup) -> None:
    noted = Noted(group)
    pool = EnginePool(noted, ONE, max_running=16)
    for turn, expected in enumerate([1, 1, None]):
        noted.leaves.clear()
        await pool.generate(request(f"turn{turn}", (5, 17, turn), 3), affinity="a", is_last=expected is None)
        assert noted.leaves[0] == expected


async def test_neighbours_meet_flatten_engine_which_holds_no_more_than_it_may(group: WorkerGroup) -> None:
    async def drive(max_running: int) -> list[list[int]]:
        await group.call("seen")
        pool = EnginePool(group, TWO, max_running=max_running)
        await asyncio.gather(*(pool.generate(request(f"{n}", (5, 17), 4, n)) for n in range(12)))
        return [[seed for _, _, seed in of_rank] for of_rank in await group.call("seen")]

    assert await drive(100) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    first, second = await drive(2)
    assert (first[:2], second[:2]) == ([0, 1], [2, 3]) and sorted(first + second) == list(range(12))


async def test_samples_of_one_prompt_share_its_prefix(group: WorkerGroup) -> None:
    pool = EnginePool(group, ONE, max_running=16)
    prompt = tuple(range(5, 105))
    await asyncio.gather(*(pool.generate(request(f"{n}", prompt, 4, n)) for n in range(8)))
    # Whole blocks of 32 tokens, of all but the first.
    assert pool.metrics()["rollout/prefix_hits"] == pytest.approx(7 * 96 / (8 * 100))
    assert pool.metrics()["rollout/prefix_hits"] == 0
    await group.call("seen")


async def test_what_an_evaluation_samples_is_counted_apart(group: WorkerGroup) -> None:
    pool = EnginePool(group, TWO, max_running=16)
    # A server that asks for an attempt has no context of the attempt's.
    served = AttemptEngine(pool)
    training = [asyncio.create_task(pool.generate(request(f"{n}", (5, 17, n), 20, n))) for n in range(3)]
    token = COUNTED_FOR.set("evaluation")
    serving = AttemptEngine(pool)
    evaluation = [asyncio.create_task(pool.generate(request(f"e{n}", (5, 17, n), 10, n))) for n in range(2)]
    COUNTED_FOR.reset(token)
    evaluation.append(asyncio.create_task(serving.generate(request("e2", (5, 17, 2), 10, 2))))
    training.append(asyncio.create_task(served.generate(request("3", (5, 17, 3), 20, 3))))
    found = {purpose: await asyncio.gather(*tasks) for purpose, tasks in (("t", training), ("e", evaluation))}
    num_tokens = {purpose: sum(len(one.token_ids) for one in ones) for purpose, ones in found.items()}
    assert pool.evaluation_metrics() == {
        "rollout/evaluation_tokens": num_tokens["e"],
        "rollout/tokens_during_evaluation": num_tokens["t"],
    }
    assert pool.metrics()["rollout/sampled_tokens"] == 0
    later = await pool.generate(request("later", (5, 17), 5))
    assert pool.metrics()["rollout/sampled_tokens"] == len(later.token_ids)
    assert pool.evaluation_metrics() == {"rollout/evaluation_tokens": 0}
    await group.call("seen")


async def test_a_request_that_is_refused_leaves_the_others_as_they_were(group: WorkerGroup) -> None:
    await group.call("seen")
    pool = EnginePool(group, ONE, max_running=8)
    good = [request(f"good{n}", (5, 17, n), 12, n) for n in range(3)]
    alone = await asyncio.gather(*map(pool.generate, good))
    bad = [request("long", (5,) * 300, 4), request("empty", (), 4), request("unknown", (10**9,), 4)]
    *together, too_long, empty, unknown = await asyncio.gather(*map(pool.generate, [*good, *bad]))
    assert [c.token_ids.tolist() for c in together] == [c.token_ids.tolist() for c in alone]
    for completion in (too_long, empty, unknown):
        assert completion.finish_reason == "error" and completion.error and not len(completion.token_ids)


@pytest.mark.timeout(120)
async def test_a_cancelled_request_leaves_its_engine_at_once(group: WorkerGroup) -> None:
    await group.call("seen")
    pool = EnginePool(group, ONE, max_running=2)
    long = await long_one(pool, 200)
    running = asyncio.create_task(pool.generate(long))
    waiting = [asyncio.create_task(pool.generate(request(f"{n}", (5,), 200, n))) for n in range(3)]
    await pool.generate(request("short", (5, 17), 1), affinity="short")
    for task in (running, *waiting):
        task.cancel()
    await asyncio.gather(running, *waiting, return_exceptions=True)
    await pool.wait_until_drained()
    assert await group.call("unfinished") == [0, 0]
    again = await pool.generate(long)
    assert len(again.token_ids) == 200


class CountedRequest(Request):
    """A request that counts how often it is compared with another."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedRequest.num_comparisons += 1
        return super().__eq__(other)

    __hash__ = Request.__hash__


async def test_thousands_that_wait_are_cancelled_one_by_one_without_a_search(group: WorkerGroup) -> None:
    await group.call("seen")
    pool = EnginePool(group, ONE, max_running=1)
    tasks: dict[str, asyncio.Task[Completion]] = {}
    for n in range(20_001):
        asked = request(f"{n}", (5, 17), 4, n)
        if n % 5000:
            asked = CountedRequest(f"{n}", asked.prompt_token_ids, asked.sampling, asked.seed)
        tasks[asked.request_id] = asyncio.create_task(pool.generate(asked))
    await asyncio.sleep(0)
    kept = [tasks.pop(f"{n}") for n in range(0, 20_001, 5000)]
    for task in tasks.values():
        task.cancel()
    cancelled = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in cancelled)
    await asyncio.gather(*kept)
    assert CountedRequest.num_comparisons == 0
    [first, _] = await group.call("seen")
    assert [name for name, _, _ in first] == ["0", "5000", "10000", "15000", "20000"]


async def test_an_abandoned_step_leaves_no_request_in_the_engines(group: WorkerGroup) -> None:
    await group.call("seen")
    pool = EnginePool(group, TWO, max_running=4, budget_seconds=0.01)
    looks = iter([False, True])

    async def endless(number: int) -> None:
        for turn in range(10**6):
            await pool.generate(request(f"{number}.{turn}", (5, number), 200, turn), affinity=f"{number}")

    with pytest.raises(AbandonedError):
        await gather_unless_abandoned(pool, map(endless, range(12)), lambda: next(looks))
    assert await group.call("unfinished") == [0, 0]


def test_a_replica_starts_no_more_requests_than_fit() -> None:
    unused: Any = None
    pool = EnginePool(unused, TWO, max_running=4)
    pool._queues.common.update({f"{n}": request(f"{n}", (5,), 8) for n in range(11)})
    first, second = pool._replicas
    assert [[r.request_id for r in pool._queues.admit_requests(replica)] for replica in (first, second)] == [
        list("0123"),
        list("4567"),
    ]
    assert pool._queues.admit_requests(first) == ()
    # Two places are free now, and its share is all that waits but one: rounded up, half of nine.
    for name in "01":
        first.running.pop(name)
    assert [r.request_id for r in pool._queues.admit_requests(first)] == ["8", "9"]


async def test_requests_of_an_excluded_replica_wait_for_the_others() -> None:
    unused: Any = None
    pool = EnginePool(unused, TWO, max_running=4)
    first, second = pool._replicas
    for name, replica in (("a", first), ("b", second), ("c", first)):
        future = asyncio.get_running_loop().create_future()
        pool._requests.pending[name] = PendingRequest(request(name, (5,), 8), future, [])
        replica.running[name] = None
    pool._queues.common["waits"] = request("waits", (5,), 8)
    pool.set_live_replicas({second.ranks[0]})
    # They go before those that wait already, the oldest first.
    assert (list(pool._queues.common), list(first.running), list(second.running)) == (["a", "c", "waits"], [], ["b"])
    assert (pool.take_lost(), pool.take_lost()) == (2, 0)
    load = pool.load()
    assert (load.num_waiting, load.num_running, load.num_live, load.num_lost) == (3, 1, 1, 1)


async def test_aborted_requests_go_before_those_that_wait_the_oldest_first() -> None:
    unused: Any = None
    pool = EnginePool(unused, TWO, max_running=4)
    for name in ("a", "c"):
        future = asyncio.get_running_loop().create_future()
        pool._requests.pending[name] = PendingRequest(request(name, (5,), 8), future, [])
    pool._queues.common["waits"] = request("waits", (5,), 8)
    pool._requests.requeue_aborted(["a", "c"], {})
    assert list(pool._queues.common) == ["a", "c", "waits"]


async def test_the_last_lost_replica_fails_the_requests_that_it_got_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unused: Any = None
    pool = EnginePool(unused, TWO, max_running=4)
    monkeypatch.setattr(pool, "_start_pumps", lambda: None)
    first, second = pool._replicas
    future = asyncio.get_running_loop().create_future()
    pool._requests.pending["a"] = PendingRequest(request("a", (5,), 8), future, [])
    pool._queues.homes["trajectory"] = first
    first.running["a"] = None
    pool._drop_replica(first, PeerLostError("the first is lost"))
    assert list(pool._queues.common) == ["a"] and not pool._queues.homes and not future.done()
    pool._drop_replica(second, PeerLostError("the last is lost"))
    assert str(future.exception()) == "the last is lost"


async def test_ranks_behind_the_first_of_a_replica_get_no_requests() -> None:
    asked: list[tuple[list[int], list[Any]]] = []

    class Ranks:
        async def ask(self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *args: Any, **_: Any) -> Any:
            asked.append((list(ranks), list(per_rank)))
            return [[], [], []]

    pool = EnginePool(Ranks(), ParallelConfig(tp=3, pp=1, dp=1, rollout_tp=3), max_running=4)
    new = (request("a", (5,), 8),)
    assert await pool._call_engine(pool._replicas[0], new, ("b",), 1.0) == []
    assert asked == [([0, 1, 2], [(new, ("b",)), ((), ()), ((), ())])]


async def test_no_turn_follows_its_prefix_over_a_pause() -> None:
    """The weights may change meanwhile, and the cached keys and values with them."""
    unused: Any = None
    pool = EnginePool(unused, TWO, max_running=4)
    pool._queues.homes["trajectory"] = pool._replicas[1]
    await pool.pause()
    assert pool.is_paused and not pool._queues.homes


async def test_the_first_error_of_an_attempt_ends_the_others_at_once() -> None:
    ended: list[str] = []

    async def fail() -> None:
        raise ValueError("an attempt's own error")

    async def wait_forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def drain() -> None:
        ended.append("drained")

    pool: Any = SimpleNamespace(wait_until_drained=drain)
    # The limit is reached only if the error waits for the other attempt.
    with pytest.raises(ValueError, match="an attempt's own error"):
        await asyncio.wait_for(gather_unless_abandoned(pool, [wait_forever(), fail()], lambda: False), 60)
    assert ended == ["cancelled", "drained"]


@pytest.mark.distributed
async def test_an_engine_that_dies_fails_every_request(model_path: str) -> None:
    async def fails(call: Awaitable[Completion]) -> bool:
        try:
            await call
        except PeerLostError:
            return True
        return False

    async with engines(model_path, 2) as group:
        pool = EnginePool(group, TWO, max_running=8, budget_seconds=0.05)
        calls = [pool.generate(request(f"{n}", (5, n), 250, n)) for n in range(8)]
        tasks = [asyncio.create_task(fails(call)) for call in calls]
        await asyncio.sleep(0.1)
        group.places[1].agent.kill([group.ranks.handles[1]])
        assert any(await asyncio.gather(*tasks))
        assert await fails(pool.generate(request("later", (5,), 4)))


async def test_a_request_id_is_used_once_at_a_time(group: WorkerGroup) -> None:
    await group.call("seen")
    pool = EnginePool(group, ONE, max_running=8)
    first = asyncio.create_task(pool.generate(request("one", (5, 17), 4)))
    await asyncio.sleep(0)
    reports: list[int] = []
    with pytest.raises(ValueError, match="one is in use"):
        await pool.generate(request("one", (5, 17), 4), on_abort=reports.append)
    await first
    pool.fail(RuntimeError("the engines are lost"))
    with pytest.raises(RuntimeError, match="lost"):
        await pool.generate(request("two", (5, 17), 4), on_abort=reports.append)
    assert reports == [0, 0]
