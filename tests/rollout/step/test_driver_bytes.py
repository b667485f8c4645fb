"""A step of RL sends at most a gigabyte through the driver, for a large mixture of experts with router replay.

Builds a step's trajectories with synthetic lengths, and pickles what the driver receives and sends: requests and
completions, the rows of log-probs and of the update, their results. No model is needed.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from megarl.cluster.rank_model import RankModel
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.advantages import compute_advantages, compute_importance_weights
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.stitch import ModelCall, stitch
from megarl.tracking.metrics import Sum
from megarl.tracking.outcomes import Update, UpdateOutcome
from megarl.types import Completion, ExpertsHandle, Problem, Request, Reward, SamplingSettings, Trajectory

SAMPLES_PER_PROMPT, PROMPT_TOKENS = 16, 512
LIMIT_BYTES = 10**9
APPLIED = UpdateOutcome(applied=True, grad_norm=1.0, learning_rate=1e-3)


@dataclass
class CountingRanks:
    """Ranks that count what the driver sends them and answer with results of the right size."""

    parallel: ParallelConfig
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)

    async def scatter(self, method: str, per_rank: Sequence[Any], *args: Any) -> list[Any]:
        results = []
        self.sent[method] = self.received[method] = 0
        for rank, rows in enumerate(per_rank):
            at = self.parallel.coordinates(rank)
            self.sent[method] += len(pickle.dumps((method, (rows, *args), {}), protocol=5))
            replica_rows: list[TokenBatch] = per_rank[self.parallel.replica_ranks(at.dp)[0]]
            result: Any = None if method == "policy.forward" else Update(APPLIED, {})
            if at.tp == 0 and at.pp == self.parallel.pp - 1:
                result = Update(APPLIED, {"train/tokens": Sum(1.0)})
                if method == "policy.forward":
                    result = [np.zeros(len(row.token_ids), np.float32) for row in replica_rows]
            self.received[method] += len(pickle.dumps((True, result, None), protocol=5))
            results.append(result)
        return results


def make_groups(count: int, mean_tokens: int, ranks: CountingRanks) -> list[list[Trajectory]]:
    """Return groups of trajectories of log-normal lengths with a given mean, and count the bytes of their calls."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(0.0, 0.6, count)
    lengths = np.maximum(1, lengths / lengths.mean() * mean_tokens - PROMPT_TOKENS).astype(int)
    sampling = SamplingSettings(max_new_tokens=int(lengths.max()))
    ranks.sent["advance"] = ranks.received["advance"] = 0
    groups: list[list[Trajectory]] = []
    for sample, length in enumerate(lengths.tolist()):
        group, number = divmod(sample, SAMPLES_PER_PROMPT)
        prompt = random.integers(0, 151936, PROMPT_TOKENS).astype(np.int32)
        request = Request(f"{group}.{number}", prompt, sampling, sample)
        completion = Completion(
            request_id=request.request_id,
            token_ids=random.integers(0, 151936, length),
            rollout_logprobs=-random.random(length, np.float32),
            finish_reason="stop",
            weight_versions=np.ones(length, np.int32),
            routed_experts=ExpertsHandle(sample % ranks.parallel.world_size, sample << 20),
        )
        ranks.sent["advance"] += len(pickle.dumps(request, protocol=5))
        ranks.received["advance"] += len(pickle.dumps(completion, protocol=5))
        segments = stitch([ModelCall(prompt, completion)])
        problem = Problem(group, (), tuple(prompt.tolist()), "")
        reward = Reward(float(random.integers(2)), True, True)
        if number == 0:
            groups.append([])
        groups[-1].append(Trajectory("single_turn", problem, group, number, segments, reward))
    return groups


async def step(groups: list[list[Trajectory]], ranks: CountingRanks, row_tokens: int) -> int:
    """Compute log-probs and one update on all of a step, as the RL loop does. Returns the number of tokens."""
    recipe = Recipe.model_validate(
        {
            "name": "bytes", "loop": "rl", "model": {"path": "none"}, "data": {"train": "none"},
            "algorithm": {"importance_sampling": "tis"},
        }
    )  # fmt: skip
    group: Any = ranks
    trainer = RankModel(group, ranks.parallel, row_tokens)
    batch = RLBatch.from_groups(groups)
    batch.per_token["old_logprobs"] = await trainer.forward(batch)
    compute_advantages(batch, recipe, 0.0)
    compute_importance_weights(batch, recipe.algorithm)
    for minibatch in batch.minibatches(recipe, 1):
        await trainer.update(minibatch, 0.0)
    return len(batch.token_ids)


def count_step(num_samples: int, mean_tokens: int, *, tp: int, dp: int) -> tuple[CountingRanks, int]:
    """Run a step. Returns ranks with the bytes of each call, and the number of tokens."""
    ranks = CountingRanks(ParallelConfig(tp=tp, pp=1, dp=dp, rollout_tp=tp))
    groups = make_groups(num_samples, mean_tokens, ranks)
    longest = max(len(segment) for group in groups for t in group for segment in t.segments)
    return ranks, asyncio.run(step(groups, ranks, max(longest, 2 * mean_tokens)))


def test_bytes_do_not_grow_with_the_ranks_of_a_replica() -> None:
    bytes_per_token = []
    for tp in (1, 8):
        ranks, num_tokens = count_step(32, 2000, tp=tp, dp=2)
        assert list(ranks.sent) == list(ranks.received) == ["advance", "policy.forward", "policy.update"]
        bytes_per_token.append((sum(ranks.sent.values()) + sum(ranks.received.values())) / num_tokens)
    # Token ids in and out twice, a mask, five arrays of float32 and two answers.
    assert 40 < bytes_per_token[0] < 70 and bytes_per_token[1] == pytest.approx(bytes_per_token[0], rel=0.05)


@pytest.mark.long
def test_a_large_step_stays_below_a_gigabyte() -> None:
    """512 completions of 8,192 tokens on 32 ranks. Routed experts would add 2 * 48 layers * 8 bytes a token."""
    ranks, num_tokens = count_step(512, 8192, tp=4, dp=8)
    assert num_tokens > 4_000_000
    assert sum(ranks.sent.values()) + sum(ranks.received.values()) <= LIMIT_BYTES
