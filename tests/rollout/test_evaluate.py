"""The driver's side of engines and trainer, against ranks that only keep the protocol: who gets what, in what order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megarl.config.parallel import ParallelConfig
from megarl.rewards.worker import Failure, Scored
from megarl.rollout.evaluate import accuracy, failure_metrics
from megarl.rollout.pool import AbandonedError, EnginePool, sample_requests
from megarl.types import Completion, MegarlError, Problem, Request, Reward, SamplingSettings, Trajectory

SAMPLING = SamplingSettings(max_new_tokens=8)


class Engines:
    """Ranks whose leaders finish `pace[leader]` requests a call, the newest first; all that reached them is kept."""

    def __init__(self, layout: ParallelConfig, pace: dict[int, int]) -> None:
        self.layout, self.pace, self.world_size = layout, pace, layout.world_size
        self.running: dict[int, list[Request]] = {leader: [] for leader in pace}
        self.seen: dict[int, list[Request]] = {leader: [] for leader in pace}
        self.most = 0

    async def scatter(self, method: str, per_rank: Sequence[Any], *args: Any) -> list[Any]:
        assert method == "advance" and len(per_rank) == self.world_size
        assert args == ((0.0,) if any(aborts for _, aborts in per_rank) else (1.0,))
        results: list[Any] = [None] * self.world_size
        for rank, (new, aborts) in enumerate(per_rank):
            assert rank in self.pace or not (new or aborts), f"rank {rank} is no leader"
            if aborts:
                assert set(aborts) == {request.request_id for request in self.running[rank]} and not new
                self.running[rank] = []
            elif rank in self.pace:
                self.running[rank] += new
                self.seen[rank] += new
                self.most = max(self.most, len(self.running[rank]))
                results[rank] = [
                    finished(self.running[rank].pop()) for _ in range(min(self.pace[rank], len(self.running[rank])))
                ]
        return results

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        raise AssertionError(method)

    async def close(self) -> None:
        raise AssertionError


def finished(request: Request) -> Completion:
    tokens = np.array([request.prompt_token_ids[0], request.seed])
    return Completion(request.request_id, tokens, np.zeros(2, np.float32), "stop", 0)


def requests(count: int) -> list[Request]:
    return [Request(str(number), (number,), SAMPLING, number) for number in range(count)]


def sampled(engines: Engines, count: int, max_running: int) -> list[str]:
    async def collect() -> list[str]:
        answers = sample_requests(engines, engines.layout, requests(count), max_running=max_running)
        return [completion.request_id async for completion in answers]

    return asyncio.run(collect())


def test_every_request_is_sampled_once() -> None:
    engines = Engines(ParallelConfig(tp=2, pp=1, dp=2, rollout_tp=2), {0: 2, 2: 3})
    finishing = sampled(engines, 23, max_running=100)
    assert sorted(map(int, finishing)) == list(range(23))
    assert finishing[:5] == ["11", "10", "22", "21", "20"]


def test_neighbours_meet_in_one_replica() -> None:
    engines = Engines(ParallelConfig(tp=1, pp=1, dp=3, rollout_tp=1), {0: 1, 1: 1, 2: 1})
    sampled(engines, 12, max_running=100)
    assert [[request.seed for request in engines.seen[leader]] for leader in (0, 1, 2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_a_replica_holds_no_more_than_it_may() -> None:
    engines = Engines(ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=1), {0: 1, 1: 4})
    assert len(sampled(engines, 40, max_running=5)) == 40
    assert engines.most == 5
    assert len(engines.seen[1]) > 2 * len(engines.seen[0])


def test_sampling_that_is_abandoned_leaves_no_request() -> None:
    engines = Engines(ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=1), {0: 1, 1: 1})
    looks = iter([False, False, True])

    async def collect() -> list[str]:
        answers = sample_requests(
            engines, engines.layout, requests(9), max_running=100, is_abandoned=lambda: next(looks)
        )
        return [completion.request_id async for completion in answers]

    with pytest.raises(AbandonedError):
        asyncio.run(collect())
    assert engines.running == {0: [], 1: []}


def test_no_requests_need_no_engine() -> None:
    assert sampled(Engines(ParallelConfig(1, 1, 1, 1), {0: 1}), 0, max_running=1) == []


class Words:
    """Decodes [first prompt token, seed] to `first prompt token`."""

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return str(token_ids[0])


class Scores:
    """Right where the text is the answer; later answers come back sooner."""

    async def score(self, text: str, answer: str) -> Scored:
        await asyncio.sleep(0.02 / (1 + int(text)))
        return Scored(Reward(float(text == answer), int(text) % 2 == 0, text == answer))


def pool(layout: ParallelConfig, pace: dict[int, int], max_running: int) -> Any:
    tokenizer: Any = Words()
    rewards: Any = Scores()
    return EnginePool(Engines(layout, pace), layout, tokenizer, rewards, max_running)


PROBLEMS = [
    Problem(index, ({"role": "user"},), (token,), answer)
    for index, token, answer in ((7, 3, "3"), (2, 4, "4"), (11, 6, "5"))
]
ONE = (ParallelConfig(1, 1, 1, 1), {0: 1}, 100)
TWO = (ParallelConfig(1, 1, 2, 1), {0: 1, 1: 3}, 2)


def answers(setting: Any, problems: Sequence[Problem] = PROBLEMS, **arguments: Any) -> list[Any]:
    return asyncio.run(pool(*setting).sample(problems, SAMPLING, **arguments))


@pytest.mark.parametrize("setting", [pytest.param(ONE, id="one engine"), pytest.param(TWO, id="two engines")])
def test_answers_come_by_problem(setting: Any) -> None:
    got = answers(setting, samples_per_prompt=2, seed="s")
    assert [(a.group, a.problem.index, a.text) for a in got] == [
        (0, 7, "3"),
        (0, 7, "3"),
        (1, 2, "4"),
        (1, 2, "4"),
        (2, 11, "6"),
        (2, 11, "6"),
    ]
    assert [a.reward.score for a in got] == [1, 1, 1, 1, 0, 0]
    assert got[0].record() == {
        "prompt": ({"role": "user"},),
        "completion": "3",
        "answer": "3",
        "reward": 1.0,
        "reward_failure": None,
        "answer_correct": True,
        "format_valid": False,
        "finish_reason": "stop",
        "tokens": 2,
    }


def test_a_seed_follows_the_problem_and_the_sample_alone() -> None:
    def seeds(setting: Any, problems: Sequence[Problem] = PROBLEMS, seed: str = "s") -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for a in answers(setting, problems, samples_per_prompt=3, seed=seed):
            found.setdefault(a.problem.index, []).append(int(a.segments[0].token_ids[-1]))
        return found

    expected = seeds(ONE)
    drawn = [seed for of_problem in expected.values() for seed in of_problem]
    assert len(set(drawn)) == 9 and all(0 <= seed < 2**31 for seed in drawn)
    assert seeds(TWO) == expected
    assert seeds(ONE, PROBLEMS[::-1]) == expected
    assert not set(drawn) & {seed for of_problem in seeds(ONE, seed="t").values() for seed in of_problem}


def test_accuracy() -> None:
    measured, answered = asyncio.run(accuracy(pool(*TWO), PROBLEMS, SAMPLING))
    assert measured == pytest.approx({"accuracy": 2 / 3, "format_valid": 2 / 3, "completion_tokens/mean": 2.0})
    assert [a.problem.index for a in answered] == [7, 2, 11]


@pytest.mark.parametrize("limit", [0.05, 0.5])
def test_completions_that_could_not_be_scored_are_counted_and_end_a_run_where_they_are_too_many(limit: float) -> None:
    zero = Reward(0.0, False, False)
    failures: tuple[Failure | None, ...] = ("error", None, "timeout", "error", None, None)
    trajectories = [Trajectory("single_turn", PROBLEMS[0], 0, 0, (), zero, failure) for failure in failures]
    if limit == 0.5:
        counted = failure_metrics(trajectories, limit, "val/easy/reward_")
        assert counted == {"val/easy/reward_errors": 2.0, "val/easy/reward_timeouts": 1.0}
        assert failure_metrics([], limit, "reward/") == {"reward/errors": 0.0, "reward/timeouts": 0.0}
        return
    with pytest.raises(MegarlError) as caught:
        failure_metrics(trajectories, limit, "reward/")
    assert caught.value.exit_code == 70
    for words in ("3 of 6 completions", "reward/errors 2, reward/timeouts 1", "reward.max_failed_fraction = 0.05"):
        assert words in str(caught.value)
