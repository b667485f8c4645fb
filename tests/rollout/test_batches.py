"""Answers to sequences, weights and metrics: numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.importance import gap_moments
from megarl.config import AlgorithmConfig, Recipe
from megarl.rollout.batches import (
    add_advantages,
    add_corrections,
    assign_token_weights,
    critic_batches,
    reward_metrics,
    split,
    staleness_metrics,
    to_sequences,
    update_metrics,
)
from megarl.rollout.stitch import single_call
from megarl.tracking.metrics import Max, Mean, Metric, Sum
from megarl.types import Completion, Problem, Reward, TrainingSequence, Trajectory


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
        weight_version=1,
    )
    segment = single_call(problem.prompt_token_ids, completion)
    ended = "length" if finish_reason == "length" else "done"
    reward = Reward(score, score >= 0, score > 0)
    return Trajectory("single_turn", problem, group, 0, (segment,), reward, text="text", ended=ended)


def masked(*masks: str) -> list[TrainingSequence]:
    return [TrainingSequence(np.arange(len(m)), np.array([c == "x" for c in m])) for m in masks]


def weights(sequences: list[TrainingSequence]) -> list[list[float]]:
    return [[] if s.token_weights is None else s.token_weights.tolist() for s in sequences]


def advantages(answers: list[Trajectory], changed: Recipe, kl_coefficient: float = 0.0) -> list[list[float]]:
    """Each sequence's, without its prompt; policy log-probs of the trainer are those of the engine less 1/2."""
    sequences = [
        replace(s, old_logprobs=s.rollout_logprobs - np.float32(0.5), reference_logprobs=s.rollout_logprobs)
        for s in to_sequences(answers, changed, 1)
        if s.rollout_logprobs is not None
    ]
    found, _ = add_advantages(sequences, answers, changed, kl_coefficient)
    return [s.advantages[2:].tolist() for s in found if s.advantages is not None]


def test_to_sequences() -> None:
    answers = [attempt(0, 1.0, 2), attempt(0, -1.0, 1, prompt=3), attempt(1, 5.0, 2), attempt(1, 5.0, 1)]
    sequences, metrics = add_advantages(to_sequences(answers, recipe(), 1), answers, recipe(), 0.0)
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


FOUR = [attempt(4, 3.0, 1), attempt(4, 0.0, 2), attempt(9, 1.0, 1), attempt(9, 2.0, 1)]
CENTRED = {"normalize_by_std": False}


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        pytest.param(CENTRED, [[1.5], [-1.5, -1.5], [-0.5], [0.5]], id="without deviation"),
        # The KL is -1/2 a token; the longer sample's reward grows by twice as much.
        pytest.param(
            CENTRED | {"kl_coefficient": 1.0, "kl_placement": "reward", "kl_estimator": "k1"},
            [[1.25], [-1.25, -1.25], [-0.5], [0.5]],
            id="kl in the reward",
        ),
        pytest.param(
            CENTRED | {"kl_coefficient": 1.0, "kl_placement": "advantage", "kl_estimator": "k1"},
            [[2.0], [-1.0, -1.0], [0.0], [1.0]],
            id="kl in the advantage",
        ),
        pytest.param(
            CENTRED | {"kl_coefficient": 1.0, "kl_placement": "return", "kl_estimator": "k1"},
            [[2.0], [-0.5, -1.0], [0.0], [1.0]],
            id="kl in the return",
        ),
        pytest.param(CENTRED | {"kl_coefficient": 1.0}, [[1.5], [-1.5, -1.5], [-0.5], [0.5]], id="kl in the loss"),
        # 16 tokens are the most: in the last 15 of them the reward falls, so 2 tokens cost a fifteenth.
        pytest.param(
            CENTRED | {"overlong_buffer": 15}, [[1.5 + 1 / 30], [-1.5 - 1 / 30] * 2, [-0.5], [0.5]], id="overlength"
        ),
        pytest.param(CENTRED | {"advantage": "opo"}, [[2.0], [-1.0, -1.0], [-0.5], [0.5]], id="opo takes lengths"),
        pytest.param({"advantage": "pass_at_k", "pass_k": 1}, [[1.0], [-1.0, -1.0], [0.0], [0.0]], id="pass at 1"),
        pytest.param(
            CENTRED | {"kl_coefficient": 1.0, "kl_placement": "advantage", "kl_estimator": "k3", "k3_max": 0.05},
            [[1.45], [-1.55, -1.55], [-0.55], [0.45]],
            id="k3 of exp(1/2) - 3/2 is held",
        ),
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
    changed = recipe(algorithm={"mask_truncated": True, "kl_coefficient": 1.0, "kl_placement": "advantage"})
    answers = [attempt(0, 1.0, 2, "length"), attempt(0, 0.0, 2)]
    assert [s.loss_mask.sum() for s in to_sequences(answers, changed, 1)] == [0, 2]
    assert advantages(answers, changed)[0] == [0, 0]


def test_corrections_weigh_tokens() -> None:
    [sequence] = to_sequences([attempt(0, 1.0, 2)], recipe(), 1)
    # Ratios of e^(1/2) on the first token and e^2 on the second, cut to 2.
    old = np.array([0, 0, -0.5, 0], np.float32)
    config = AlgorithmConfig.model_validate({"importance_sampling": "tis"})
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
    sequences = assign_token_weights(
        masked("-xx", "-x-x", "--"), AlgorithmConfig(aggregation=aggregation), constant_length=10
    )
    for got, wanted in zip(weights(sequences), expected, strict=True):
        assert got == pytest.approx(wanted)


def test_weigh_tells_token_mean_from_sequence_mean() -> None:
    sequences = masked("-xxx", "-x")
    assert weights(assign_token_weights(sequences, AlgorithmConfig(aggregation="token_mean"))) == [
        [0, 0.25, 0.25, 0.25],
        [0, 0.25],
    ]
    means = weights(assign_token_weights(sequences, AlgorithmConfig(aggregation="sequence_mean_token_mean")))
    assert means[0] == pytest.approx([0, 1 / 6, 1 / 6, 1 / 6]) and means[1] == [0, 0.5]


def test_split_weighs_each_update_alone() -> None:
    two = recipe(train={"updates_per_step": 2}, algorithm={"aggregation": "token_mean"})
    updates = split(masked("-x", "-xxx", "-xx", "-xxxxxx"), two, 1)
    assert [[len(s) for s in update] for update in updates] == [[2, 4], [3, 7]]
    assert [sum(map(sum, weights(update))) for update in updates] == pytest.approx([1, 1])
    assert weights(updates[0])[0] == [0, 0.25] and weights(updates[1])[0] == [0, 0.125, 0.125]


def test_split_divides_by_the_longest_completion() -> None:
    longest = recipe(algorithm={"aggregation": "constant_length"}, rollout={"sampling": {"max_new_tokens": 8}})
    [update] = split(masked("-x", "-xx"), longest, 1)
    assert weights(update) == [[0, 0.0625], [0, 0.0625, 0.0625]]


def test_the_gap_is_that_of_all_updates() -> None:
    def update(gap: float, loss: float, tokens: float) -> dict[str, Metric]:
        moments = gap_moments(torch.tensor([-1.0 - gap]), torch.tensor([-1.0]))
        found: dict[str, Metric] = {f"logprob_gap/{n}": Mean(float(v), tokens) for n, v in moments.items()}
        return found | {
            "logprob_gap/max": Max(gap),
            "logprob_gap/measured": Mean(1.0, tokens),
            "train/loss": Sum(loss),
        }

    metrics = update_metrics([update(0.5, 1.0, 3.0), update(0.1, 2.0, 1.0)])
    assert metrics["train/loss"] == 3.0 and metrics["logprob_gap/max"] == 0.5
    assert metrics["logprob_gap/mean"] == pytest.approx(0.4) and metrics["logprob_gap/measured"] == 1.0
    assert metrics["logprob_gap/perplexity_ratio"] == pytest.approx(np.exp(0.4))
    assert {"logprob_gap/ess", "logprob_gap/correlation"} <= metrics.keys() and "logprob_gap/product" not in metrics
    unmeasured: dict[str, Metric] = {"logprob_gap/measured": Mean(0.0, 4.0)}
    assert update_metrics([unmeasured]) == {"logprob_gap/measured": 0.0}
    assert update_metrics([update(0.5, 1.0, 3.0), unmeasured])["logprob_gap/measured"] == pytest.approx(3 / 7)
    assert update_metrics([{"train/loss": Sum(1.0)}]) == {"train/loss": 1.0} and update_metrics([]) == {}


def test_answers_that_waited_keep_where_their_ratio_starts() -> None:
    fresh = attempt(0, 1.0, 2)
    fresh = replace(fresh, segments=(replace(fresh.segments[0], weight_versions=np.array([-1, -1, 3, 3])),))
    waited = attempt(0, 0.0, 1)
    waited = replace(waited, segments=(replace(waited.segments[0], old_logprobs=np.array([0, 0, -7], np.float32)),))
    now, then = to_sequences([fresh, waited], recipe(), 3)
    assert now.old_logprobs is not None and then.old_logprobs is not None
    assert now.old_logprobs.tolist() == pytest.approx([0, 0, np.nan, np.nan], nan_ok=True)
    assert then.old_logprobs.tolist() == [0, 0, -7] and then.old_logprobs.dtype == np.float32
    assert then.rollout_logprobs is not None and then.rollout_logprobs.tolist() == [0, 0, -1]
    assert to_sequences([fresh], recipe(), 3)[0].old_logprobs is None
    assert staleness_metrics([fresh, waited], 3) == {"staleness/mean": 1.0, "staleness/max": 2.0}

    engine = recipe(algorithm={"old_logprobs": "rollout"}, train={"updates_per_step": 2})
    sequences = to_sequences([fresh, fresh, waited, waited], engine, 3)
    assert [s.old_logprobs is not None and s.old_logprobs[2] for s in sequences] == [-1, -1, -1, -1]
    # Compared are log-probs of equal weights alone: no answer's that waited, none's after the first update.
    compared = [[not np.isnan(s.rollout_logprobs).any() for s in sequences]]  # type: ignore[arg-type]
    mixed = [sequences[0], sequences[2], sequences[1], sequences[3]]
    for update in split(mixed, engine, 3):
        compared.append([not np.isnan(s.rollout_logprobs).any() for s in update])  # type: ignore[arg-type]
    assert compared == [[True, True, False, False], [True, False], [False, False]]


def test_each_pass_visits_all_sequences_in_an_order_of_its_own() -> None:
    sequences = masked(*("-" + "x" * length for length in range(1, 9)))

    def lengths(step: int, seed: int = 5, **train: int) -> list[list[int]]:
        batches = split(sequences, recipe(train=train, seed=seed), step)
        assert [sum(map(sum, weights(batch))) for batch in batches] == pytest.approx([1] * len(batches))
        return [[len(s) - 1 for s in batch] for batch in batches]

    once = lengths(1, updates_per_step=2)
    assert once == [[1, 2, 3, 4], [5, 6, 7, 8]]
    thrice = lengths(1, updates_per_step=2, epochs_per_step=3)
    assert thrice[:2] == once and len(thrice) == 6
    passes = [[*thrice[i], *thrice[i + 1]] for i in (0, 2, 4)]
    assert all(sorted(one) == passes[0] for one in passes) and len(set(map(tuple, passes))) == 3
    assert thrice == lengths(1, updates_per_step=2, epochs_per_step=3)
    assert thrice[2:] != lengths(2, updates_per_step=2, epochs_per_step=3)[2:]
    assert thrice[2:] != lengths(1, seed=6, updates_per_step=2, epochs_per_step=3)[2:]
    assert [len(batch) for batch in lengths(1, epochs_per_step=2)] == [8, 8]


def test_each_pass_learns_all_conversations_beside() -> None:
    twice = recipe(algorithm={"ptx_coefficient": 0.5}, train={"updates_per_step": 2, "epochs_per_step": 2})
    batches = split(masked("-x", "-xx"), twice, 1, masked("-xxx", "-xxxx"))
    assert [len(batch[-1]) for batch in batches] == [4, 5, 4, 5]


def test_reward_metrics() -> None:
    metrics = reward_metrics(
        [attempt(0, 2.0, 3), attempt(0, 0.0, 5, "length"), attempt(1, -1.0, 1), attempt(1, -1.0, 7, "length")]
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


PPO = {"advantage": "gae", "gamma": 1.0, "gae_lambda": 0.5, "kl_placement": "reward", "kl_estimator": "k1"}


@pytest.mark.parametrize(
    ("kl_coefficient", "expected", "returns"),
    [
        # Values 1 and 3 before the tokens, reward 2 after the last: deltas 2 and -1.
        pytest.param(0.0, [1.5, -1.0], [2.5, 2.0], id="reward at the end"),
        # The KL is -1/2 a token: each token's own reward is 1/2 more.
        pytest.param(1.0, [2.25, -0.5], [3.25, 2.5], id="kl in each token's reward"),
    ],
)
def test_a_critic_s_values_become_advantages_and_returns(
    kl_coefficient: float, expected: list[float], returns: list[float]
) -> None:
    changed = recipe(algorithm=PPO | {"kl_coefficient": kl_coefficient})
    answers = [attempt(0, 2.0, 2), attempt(0, 7.0, 1)]
    first, second = (
        replace(s, old_logprobs=s.rollout_logprobs - np.float32(0.5), reference_logprobs=s.rollout_logprobs)
        for s in to_sequences(answers, changed, 1)
        if s.rollout_logprobs is not None
    )
    values = np.array([9, 9, 1, 3], np.float32), np.array([9, 9, 7], np.float32)
    sequences = [replace(first, values=values[0]), replace(second, values=values[1])]
    found, metrics = add_advantages(sequences, answers, changed, kl_coefficient)
    assert [s.advantages is not None and s.returns is not None for s in found] == [True, True]
    assert found[0].advantages[2:].tolist() == pytest.approx(expected)  # type: ignore[index]
    assert found[0].returns[2:].tolist() == pytest.approx(returns)  # type: ignore[index]
    assert found[1].returns[2:].tolist() == pytest.approx([7 + kl_coefficient / 2])  # type: ignore[index]
    assert metrics["critic/value"] == pytest.approx(11 / 3)
    assert metrics["critic/return"] == pytest.approx((sum(returns) + 7 + kl_coefficient / 2) / 3)
    if not kl_coefficient:
        # Returns 2.5, 2, 7 lie 1.5, -1, 0 from the values.
        unforeseen, variance = np.var([1.5, -1.0, 0.0]), np.var([2.5, 2.0, 7.0])
        assert metrics["critic/explained"] == pytest.approx(1 - unforeseen / variance)
    [batch] = critic_batches(found, changed)
    assert weights(batch) == [[0, 0, pytest.approx(1 / 3), pytest.approx(1 / 3)], [0, 0, pytest.approx(1 / 3)]]
    assert batch[0].values is values[0] and batch[0].advantages is None and batch[0].rollout_logprobs is None
    halves = critic_batches(found, recipe(algorithm=PPO, critic={"updates_per_step": 2}))
    assert [weights(half) for half in halves] == [[[0, 0, 0.5, 0.5]], [[0, 0, 1]]]


def test_conversations_make_their_share_of_the_loss() -> None:
    changed = recipe(algorithm={"ptx_coefficient": 0.25, "aggregation": "token_mean"}, train={"updates_per_step": 2})
    sequences = [replace(s, advantages=np.full(3, 5, np.float32)) for s in masked(".xx", ".x.")]
    first, second = split(sequences, changed, 1, masked(".xx", "..xxxx", ".xx"))
    # 3/4 for the update's own tokens, 1/4 for those of its conversations: the first and third here, the second there.
    assert weights(first) == [[0, 0.375, 0.375], [0, 0.0625, 0.0625], [0, 0.0625, 0.0625]]
    assert weights(second) == [[0, 0.75, 0], [0, 0, 0.0625, 0.0625, 0.0625, 0.0625]]
    assert [s.supervised is not None and s.supervised.tolist() for s in second] == [[0] * 3, [1] * 6]
    # All sequences of a row carry the same arrays.
    assert second[1].advantages is not None and second[1].advantages.tolist() == [0] * 6
    assert second[1].old_logprobs is None


def test_a_lone_sample_and_masked_sequences_count_as_the_recipe_says() -> None:
    answers = [attempt(0, 3.0, 1), attempt(1, 4.0, 2, "length")]
    changed = recipe(algorithm={"lone_sample": "reward", "normalize_by_std": False, "mask_truncated": True})
    sequences = to_sequences(answers, changed, 1)
    found, _ = add_advantages(sequences, answers, changed, 0.0)
    assert [s.advantages.tolist() for s in found if s.advantages is not None] == [[0, 0, 3], [0, 0, 0, 0]]
    counted = AlgorithmConfig(aggregation="constant_length", count_masked_sequences=True)
    for algorithm, of_a_token in ((counted, 1 / 20), (AlgorithmConfig(aggregation="constant_length"), 1 / 10)):
        [first, _] = assign_token_weights(found, algorithm, 10)
        assert first.token_weights is not None and first.token_weights.tolist() == pytest.approx([0, 0, of_a_token])
