"""A step of RL sends at most a gigabyte through the driver, for a large mixture of experts with router replay.

Builds a step's trajectories with synthetic lengths, and pickles what the driver receives and sends: requests and
completions, the rows of log-probs and of the update, their results. No model is needed. The last row shows what the
routed experts would add if they passed through the driver: in once, and out to each tensor-parallel rank with forward
and update.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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

DURATION = {"small": "1 s", "full": "5 s"}
SMALL = {"samples": 32, "tokens": 2000, "dp": 2}
NUM_LAYERS, TOP_K = 48, 8
"""Those of Qwen3-30B-A3B."""
SAMPLES_PER_PROMPT, PROMPT_TOKENS = 16, 512


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
            of_replica: list[TokenBatch] = per_rank[self.parallel.replica_ranks(at.dp)[0]]
            result: Any = None if method == "policy.forward" else Update(APPLIED, {})
            if at.tp == 0 and at.pp == self.parallel.pp - 1:
                result = Update(APPLIED, {"train/tokens": Sum(1.0)})
                if method == "policy.forward":
                    result = [np.zeros(len(row.token_ids), np.float32) for row in of_replica]
            self.received[method] += len(pickle.dumps((True, result, None), protocol=5))
            results.append(result)
        return results


def sampled(count: int, mean_tokens: int, ranks: CountingRanks) -> list[list[Trajectory]]:
    """Groups of trajectories of log-normal lengths, with a given mean; what they cost on their way is counted."""
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
    """Log-probs and one update on all of a step, as the RL loop asks for them. Returns the step's tokens."""
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=512, help="completions of the step")
    parser.add_argument("--tokens", type=int, default=8192, help="mean tokens of prompt and completion")
    parser.add_argument("--dp", type=int, default=8, help="data-parallel replicas")
    parser.add_argument("--tp", type=int, default=4, help="tensor-parallel ranks of a replica")
    parser.add_argument("--limit-gb", type=float, default=1.0, help="more than this is a failure")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ranks = CountingRanks(ParallelConfig(tp=options.tp, pp=1, dp=options.dp, rollout_tp=options.tp))
    groups = sampled(options.samples, options.tokens, ranks)
    longest = max(len(segment) for group in groups for t in group for segment in t.segments)
    num_tokens = asyncio.run(step(groups, ranks, max(longest, 2 * options.tokens)))
    for call in ("advance", "policy.forward", "policy.update"):
        yield {
            "call": call,
            "sent_mb": ranks.sent[call] / 1e6,
            "received_mb": ranks.received[call] / 1e6,
            "tokens": num_tokens,
        }
    sent, received = (sum(counts.values()) / 1e6 for counts in (ranks.sent, ranks.received))
    met = sent + received <= options.limit_gb * 1e3
    yield {"call": "all", "sent_mb": sent, "received_mb": received, "tokens": num_tokens, "met": met}
    experts = num_tokens * NUM_LAYERS * TOP_K * 2 / 1e6
    yield {
        "call": "routed experts", "sent_mb": 2 * options.tp * experts, "received_mb": experts, "tokens": num_tokens,
    }  # fmt: skip
