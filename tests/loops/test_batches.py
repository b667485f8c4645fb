"""Answers to sequences, weights and metrics: numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.importance import gap_moments
from megarl.config import AlgorithmConfig, Recipe
from megarl.evaluation import Answered
from megarl.loops.batches import (
    add_advantages,
    add_corrections,
    reward_metrics,
    split,
    to_sequences,
    update_metrics,
    weigh,
)
from megarl.tracking.metrics import Max, Mean, Metric, Sum
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


def advantages(answers: list[Answered], changed: Recipe, kl_coefficient: float = 0.0) -> list[list[float]]:
    """Each sequence's, without its prompt; policy log-probs of the trainer are those of the engine less 1/2."""
    sequences = [
        replace(s, old_logprobs=s.rollout_logprobs - np.float32(0.5), reference_logprobs=s.rollout_logprobs)
        for s in to_sequences(answers, changed)
        if s.rollout_logprobs is not None
    ]
    found, _ = add_advantages(sequences, answers, changed, kl_coefficient)
    return [s.advantages[2:].tolist() for s in found if s.advantages is not None]


def test_to_sequences() -> None:
    answers = [answered(0, 1.0, 2), answered(0, -1.0, 1, prompt=3), answered(1, 5.0, 2), answered(1, 5.0, 1)]
    sequences, metrics = add_advantages(to_sequences(answers, recipe()), answers, recipe(), 0.0)
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
    assert metrics == {}


FOUR = [answered(4, 3.0, 1), answered(4, 0.0, 2), answered(9, 1.0, 1), answered(9, 2.0, 1)]
CENTRED = {"normalize_by_std": False}


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        pytest.param(CENTRED, [[1.5], [-1.5, -1.5], [-0.5], [0.5]], id="without deviation"),
        # The KL is -1/2 a token; the longer sample's reward grows by twice as much.
        pytest.param(
            CENTRED | {"kl_coefficient": 1.0, "kl_in": "reward", "kl_estimator": "k1"},
            [[1.25], [-1.25, -1.25], [-0.5], [0.5]],
            id="kl in the reward",
        ),
        pytest.param(
            CENTRED | {"kl_coefficient": 1.0, "kl_in": "advantage", "kl_estimator": "k1"},
            [[2.0], [-1.0, -1.0], [0.0], [1.0]],
            id="kl in the advantage",
        ),
        pytest.param(
            CENTRED | {"kl_coefficient": 1.0, "kl_in": "return", "kl_estimator": "k1"},
            [[2.0], [-0.5, -1.0], [0.0], [1.0]],
            id="kl in the return",
        ),
        pytest.param(CENTRED | {"kl_coefficient": 1.0}, [[1.5], [-1.5, -1.5], [-0.5], [0.5]], id="kl in the loss"),
        # 16 tokens are the most: in the last 15 of them the reward falls, so 2 tokens cost a fifteenth.
        pytest.param(
            CENTRED | {"overlength_buffer": 0.95}, [[1.5 + 1 / 30], [-1.5 - 1 / 30] * 2, [-0.5], [0.5]], id="overlength"
        ),
        pytest.param(CENTRED | {"advantage": "opo"}, [[2.0], [-1.0, -1.0], [-0.5], [0.5]], id="opo takes lengths"),
        pytest.param({"advantage": "pass_at_k", "pass_k": 1}, [[1.0], [-1.0, -1.0], [0.0], [0.0]], id="pass at 1"),
        pytest.param(CENTRED | {"whiten_advantages": True}, None, id="whitened"),
    ],
)
def test_advantages_of_tokens(algorithm: dict[str, Any], expected: list[list[float]] | None) -> None:
    changed = recipe(algorithm=algorithm, rollout={"sampling": {"max_new_tokens": 16}})
    found = advantages(FOUR, changed, kl_coefficient=1.0)
    if expected is None:
        flat = np.concatenate(found)
        assert flat.mean() == pytest.approx(0, abs=1e-6) and flat.std(ddof=1) == pytest.approx(1)
    else:
        assert found == [pytest.approx(part, abs=1e-6) for part in expected]


def test_truncated_completions_are_masked() -> None:
    changed = recipe(algorithm={"mask_truncated": True, "kl_coefficient": 1.0, "kl_in": "advantage"})
    answers = [answered(0, 1.0, 2, "length"), answered(0, 0.0, 2)]
    assert [s.loss_mask.sum() for s in to_sequences(answers, changed)] == [0, 2]
    assert advantages(answers, changed)[0] == [0, 0]


def test_corrections_weigh_tokens() -> None:
    [sequence] = to_sequences([answered(0, 1.0, 2)], recipe())
    # Ratios of e^(1/2) on the first token and e^2 on the second, cut to 2.
    old = np.array([0, 0, -0.5, 0], np.float32)
    config = AlgorithmConfig.model_validate({"correction": "truncated"})
    [corrected], metrics = add_corrections([replace(sequence, old_logprobs=old)], config)
    assert corrected.importance_weights is not None
    assert corrected.importance_weights.tolist() == pytest.approx([0, 0, 1.648721, 2])
    assert metrics == pytest.approx({"importance/mean": 1.824361, "importance/rejected": 0, "importance/cut": 0.5})


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        pytest.param("token_mean", [[0, 0.25, 0.25], [0, 0.25, 0, 0.25], [0, 0]], id="token mean"),
        pytest.param("sequence_mean_token_mean", [[0, 0.25, 0.25], [0, 0.25, 0, 0.25], [0, 0]], id="sequence mean"),
        pytest.param("sequence_mean_token_sum", [[0, 0.5, 0.5], [0, 0.5, 0, 0.5], [0, 0]], id="sequence sum"),
        pytest.param("constant_length", [[0, 0.05, 0.05], [0, 0.05, 0, 0.05], [0, 0]], id="constant length"),
        pytest.param("sample_level", [[0, 1 / 6, 1 / 6], [0, 1 / 6, 0, 1 / 6], [0, 0]], id="sample level"),
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


def test_the_gap_is_that_of_the_first_update() -> None:
    def update(gap: float, loss: float) -> dict[str, Metric]:
        moments = gap_moments(torch.tensor([-1.0 - gap]), torch.tensor([-1.0]))
        found: dict[str, Metric] = {f"logprob_gap/{n}": Mean(float(v), 4.0) for n, v in moments.items()}
        return found | {"logprob_gap/max": Max(gap), "train/loss": Sum(loss)}

    metrics = update_metrics([update(0.5, 1.0), update(9.0, 2.0)])
    assert metrics["train/loss"] == 3.0 and metrics["logprob_gap/max"] == metrics["logprob_gap/mean"] == 0.5
    assert metrics["logprob_gap/perplexity_ratio"] == pytest.approx(np.exp(0.5))
    assert {"logprob_gap/ess", "logprob_gap/correlation"} <= metrics.keys() and "logprob_gap/product" not in metrics
    assert update_metrics([{"train/loss": Sum(1.0)}]) == {"train/loss": 1.0}


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
