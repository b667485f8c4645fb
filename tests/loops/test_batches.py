"""Answers to sequences, weights and metrics: numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.config import AlgorithmConfig, Recipe
from megarl.evaluation import Answered
from megarl.loops.batches import first_gap, reward_metrics, split, to_sequences, weigh
from megarl.tracking.metrics import Max, Mean, Sum
from megarl.types import Completion, Problem, Reward, TrainingSequence


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}} | sections)


def answered(group: int, score: float, new_tokens: int, finish_reason: Any = "stop", prompt: int = 2) -> Answered:
    """Prompt tokens 10, 11, ...; completion tokens 50, 51, ... with log-probs -1, -2, ..."""
    problem = Problem(group, (), tuple(range(10, 10 + prompt)), "7")
    completion = Completion(
        request_id=f"{group}",
        token_ids=np.arange(50, 50 + new_tokens),
        rollout_logprobs=-np.arange(1, 1 + new_tokens, dtype=np.float32),
        finish_reason=finish_reason,
        weight_version=1,
    )
    return Answered(problem, group, completion, "text", Reward(score, score >= 0, score > 0))


def masked(*masks: str) -> list[TrainingSequence]:
    return [TrainingSequence(np.arange(len(m)), np.array([c == "x" for c in m])) for m in masks]


def weights(sequences: list[TrainingSequence]) -> list[list[float]]:
    return [[] if s.token_weights is None else s.token_weights.tolist() for s in sequences]


def test_to_sequences() -> None:
    sequences = to_sequences(
        [answered(0, 1.0, 2), answered(0, -1.0, 1, prompt=3), answered(1, 5.0, 2), answered(1, 5.0, 1)], recipe()
    )
    first, second, third, _ = sequences
    assert first.token_ids.tolist() == [10, 11, 50, 51] and first.token_ids.dtype == np.int64
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert first.rollout_logprobs is not None and first.rollout_logprobs.tolist() == [0, 0, -1, -2]
    assert second.token_ids.tolist() == [10, 11, 12, 50]
    # Rewards 1 and -1: the mean is 0, the unbiased deviation the square root of 2.
    assert first.advantages is not None and second.advantages is not None and third.advantages is not None
    assert first.advantages.tolist() == pytest.approx([0, 0, 0.70710, 0.70710], abs=1e-5)
    assert second.advantages.tolist() == pytest.approx([0, 0, 0, -0.70710], abs=1e-5)
    assert third.advantages.tolist() == [0, 0, 0, 0]
    assert {a.dtype for a in (first.advantages, first.rollout_logprobs)} == {np.dtype(np.float32)}


def test_to_sequences_without_deviation() -> None:
    plain = recipe(algorithm={"normalize_by_std": False})
    sequences = to_sequences(
        [answered(4, 3.0, 1), answered(4, 0.0, 1), answered(9, 1.0, 1), answered(9, 2.0, 1)], plain
    )
    assert [s.advantages[-1] for s in sequences if s.advantages is not None] == [1.5, -1.5, -0.5, 0.5]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        pytest.param("token_mean", [[0, 0.25, 0.25], [0, 0.25, 0, 0.25], [0, 0]], id="token mean"),
        pytest.param("sequence_mean_token_mean", [[0, 0.25, 0.25], [0, 0.25, 0, 0.25], [0, 0]], id="sequence mean"),
        pytest.param("sequence_mean_token_sum", [[0, 0.5, 0.5], [0, 0.5, 0, 0.5], [0, 0]], id="sequence sum"),
        pytest.param("constant_length", [[0, 0.05, 0.05], [0, 0.05, 0, 0.05], [0, 0]], id="constant length"),
    ],
)
def test_weigh(aggregation: Any, expected: list[list[float]]) -> None:
    sequences = weigh(masked("-xx", "-x-x", "--"), AlgorithmConfig(aggregation=aggregation), constant_length=10)
    for got, wanted in zip(weights(sequences), expected, strict=True):
        assert got == pytest.approx(wanted)


def test_weigh_tells_token_mean_from_sequence_mean() -> None:
    sequences = masked("-xxx", "-x")
    assert weights(weigh(sequences, AlgorithmConfig(aggregation="token_mean"))) == [[0, 0.25, 0.25, 0.25], [0, 0.25]]
    means = weights(weigh(sequences, AlgorithmConfig(aggregation="sequence_mean_token_mean")))
    assert means[0] == pytest.approx([0, 1 / 6, 1 / 6, 1 / 6]) and means[1] == [0, 0.5]


def test_split_weighs_each_update_alone() -> None:
    two = recipe(train={"updates_per_step": 2}, algorithm={"aggregation": "token_mean"})
    updates = split(masked("-x", "-xxx", "-xx", "-xxxxxx"), two)
    assert [[len(s) for s in update] for update in updates] == [[2, 4], [3, 7]]
    assert [sum(map(sum, weights(update))) for update in updates] == pytest.approx([1, 1])
    assert weights(updates[0])[0] == [0, 0.25] and weights(updates[1])[0] == [0, 0.125, 0.125]


def test_split_divides_by_the_longest_completion() -> None:
    longest = recipe(algorithm={"aggregation": "constant_length"}, rollout={"sampling": {"max_new_tokens": 8}})
    [update] = split(masked("-x", "-xx"), longest)
    assert weights(update) == [[0, 0.0625], [0, 0.0625, 0.0625]]


def test_first_gap_is_of_the_first_update() -> None:
    first = {"logprob_gap/max": Max(0.5), "logprob_gap/mean": Mean(0.25, 4.0), "train/loss": Sum(1.0)}
    second = {"logprob_gap/max": Max(9.0), "logprob_gap/mean": Mean(9.0, 4.0)}
    assert first_gap([first, second]) == {"logprob_gap/max": 0.5, "logprob_gap/mean": 0.25}


def test_reward_metrics() -> None:
    metrics = reward_metrics(
        [answered(0, 2.0, 3), answered(0, 0.0, 5, "length"), answered(1, -1.0, 1), answered(1, -1.0, 7, "length")]
    )
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.0,
            "reward/std": 1.2247449,
            "reward/accuracy": 0.25,
            "reward/format_valid": 0.5,
            "reward/zero_variance_groups": 0.5,
            "rollout/completion_tokens/mean": 4.0,
            "rollout/completion_tokens/max": 7.0,
            "rollout/truncated": 0.5,
        }
    )
