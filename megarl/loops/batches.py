"""From answers to what is trained on: advantages, token weights, the updates of a step; and what answers tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.reduction import token_weights
from megarl.config import AlgorithmConfig, Recipe
from megarl.evaluation import Answered
from megarl.tracking.metrics import Metric, values
from megarl.types import TrainingSequence


def to_sequences(answered: Sequence[Answered], recipe: Recipe) -> list[TrainingSequence]:
    """One sequence per completion: prompt and completion tokens, the completion's trained with its advantage."""
    algorithm = recipe.algorithm
    advantages = ADVANTAGES[algorithm.advantage](
        torch.tensor([a.reward.score for a in answered]),
        torch.tensor([a.group for a in answered]),
        normalize_by_std=algorithm.normalize_by_std,
    )
    return [_to_sequence(a, advantage) for a, advantage in zip(answered, advantages.tolist(), strict=True)]


def _to_sequence(answered: Answered, advantage: float) -> TrainingSequence:
    prompt, completion = answered.problem.prompt_token_ids, answered.completion
    trained = np.arange(len(prompt) + len(completion.token_ids)) >= len(prompt)
    routed = completion.routed_experts
    if routed is not None:
        # The last token was sampled but never read; nothing follows it, so any experts do.
        routed = np.concatenate([routed, routed[-1:]])
    return TrainingSequence(
        token_ids=np.concatenate([np.array(prompt, np.int64), completion.token_ids]),
        loss_mask=trained,
        advantages=np.where(trained, advantage, 0.0).astype(np.float32),
        rollout_logprobs=np.concatenate([np.zeros(len(prompt), np.float32), completion.rollout_logprobs]),
        routed_experts=routed,
    )


def split(sequences: Sequence[TrainingSequence], recipe: Recipe) -> list[list[TrainingSequence]]:
    """The sequences of each update of a step, groups kept together, with the token weights of that update."""
    size = len(sequences) // recipe.train.updates_per_step
    longest = recipe.rollout.sampling.max_new_tokens
    return [
        weigh(sequences[start : start + size], recipe.algorithm, longest) for start in range(0, len(sequences), size)
    ]


def weigh(
    sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig, constant_length: int | None = None
) -> list[TrainingSequence]:
    """The sequences of one update with their token weights: what each token's loss counts in the whole batch."""
    ends = np.cumsum([len(sequence) for sequence in sequences])
    weights = token_weights(
        torch.from_numpy(np.concatenate([[0], ends])),
        torch.from_numpy(np.concatenate([sequence.loss_mask for sequence in sequences])),
        algorithm.aggregation,
        constant_length=constant_length,
    )
    parts = np.split(weights.numpy(), ends[:-1])
    return [replace(sequence, token_weights=part) for sequence, part in zip(sequences, parts, strict=True)]


def first_gap(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """`logprob_gap/max` and `/mean`: |trainer - engine| log-probs, in nats, of the tokens of a step's first update.

    Only there do both speak of the same weights.
    """
    return {name: value for name, value in values(updates[0]).items() if name.startswith("logprob_gap/")}


def reward_metrics(answered: Sequence[Answered]) -> dict[str, float]:
    """What a step's completions were like.

    `reward/mean`, `/std`, `/accuracy`, `/format_valid`; `reward/zero_variance_groups`: share of groups whose rewards
    are all equal and teach nothing; `rollout/completion_tokens/mean`, `/max`; `rollout/truncated`: share that hit the
    limit.
    """
    scores = np.array([a.reward.score for a in answered])
    lengths = np.array([len(a.completion.token_ids) for a in answered])
    groups = np.array([a.group for a in answered])
    flat = [np.ptp(scores[groups == group]) == 0 for group in np.unique(groups)]
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        "reward/accuracy": float(np.mean([a.reward.answer_correct for a in answered])),
        "reward/format_valid": float(np.mean([a.reward.format_valid for a in answered])),
        "reward/zero_variance_groups": float(np.mean(flat)),
        "rollout/completion_tokens/mean": float(lengths.mean()),
        "rollout/completion_tokens/max": float(lengths.max()),
        "rollout/truncated": float(np.mean([a.completion.finish_reason == "length" for a in answered])),
    }
