"""Trajectories and batches whose numbers can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from megarl.config import AlgorithmConfig, Recipe
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.rl_batch import RLBatch, assign_token_weights
from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import Completion, Problem, Reward, Segment, TrainingSequence, Trajectory


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}} | sections)


def attempt(group: int, score: float, new_tokens: int, finish_reason: Any = "stop", prompt: int = 2) -> Trajectory:
    """Prompt tokens 10, 11, ...; completion tokens 50, 51, ... with log-probs -1, -2, ..."""
    problem = Problem(group, (), tuple(range(10, 10 + prompt)), "7")
    completion = Completion(
        request_id=f"{group}",
        token_ids=np.arange(50, 50 + new_tokens),
        rollout_logprobs=-np.arange(1, 1 + new_tokens, dtype=np.float32),
        finish_reason=finish_reason,
        weight_versions=np.ones(new_tokens, np.int32),
    )
    segments = stitch([ModelCall(np.array(problem.prompt_token_ids, np.int32), completion)])
    ended = "length" if finish_reason == "length" else "done"
    reward = Reward(score, score >= 0, score > 0)
    return Trajectory("single_turn", problem, group, 0, segments, reward, texts=("text",), ended=ended)


def batch_of(trajectories: Sequence[Trajectory], changed: Recipe | None = None) -> RLBatch:
    """Groups are side by side."""
    groups = [list(group) for _, group in groupby(trajectories, key=lambda t: t.group)]
    return RLBatch.from_groups(groups, mask_truncated=changed is not None and changed.algorithm.mask_truncated)


def masked(*masks: str) -> TokenBatch:
    """Sequences whose tokens marked x are trained."""
    return TokenBatch.from_sequences(
        [TrainingSequence(np.arange(len(m)), np.array([c == "x" for c in m])) for m in masks]
    )


def rl_batch(*masks: str) -> RLBatch:
    """Trajectories of one segment whose tokens marked x are trained."""
    segments = [
        Segment(
            np.arange(len(mask)),
            np.array([c == "x" for c in mask]),
            np.zeros(len(mask), np.float32),
            np.where([c == "x" for c in mask], 1, -1).astype(np.int32),
            np.zeros(len(mask), np.int16),
        )
        for mask in masks
    ]
    problem = Problem(0, (), (), "7")
    return RLBatch.from_groups(
        [[Trajectory("test", problem, 0, 0, (segment,), Reward(0.0, True, True)) for segment in segments]]
    )


def of_sequences(batch: TokenBatch, name: str) -> list[list[float]]:
    """A per-token array, sequence by sequence."""
    return [part.tolist() for part in np.split(batch.per_token[name], batch.cu_seqlens[1:-1])]


def weights(batch: TokenBatch) -> list[list[float]]:
    return of_sequences(batch, "token_weights")


def weighed(batch: TokenBatch, algorithm: AlgorithmConfig, constant_length: int | None = None) -> list[list[float]]:
    assign_token_weights(batch, algorithm, constant_length)
    return weights(batch)


def segmented(group: int, number: int, reward: float | None, *masks: str) -> Trajectory:
    """A trajectory whose segments' tokens marked x were sampled."""
    made = rl_batch(*masks)
    segments = tuple(
        Segment(
            made.token_ids[start:end],
            made.loss_mask[start:end],
            np.zeros(end - start, np.float32),
            made.weight_versions[start:end],
            np.zeros(end - start, np.int16),
        )
        for start, end in zip(made.cu_seqlens, made.cu_seqlens[1:], strict=False)
    )
    judged = None if reward is None else Reward(reward, True, reward > 0)
    return Trajectory("test", Problem(group, (), (), "7"), group, number, segments, judged)
