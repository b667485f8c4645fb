"""Trajectories to batches, advantages, weights and metrics: numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.importance import gap_moments
from megarl.algorithms.policy_losses import clipped
from megarl.algorithms.turns import turn_returns
from megarl.config import AlgorithmConfig, Recipe, TrainConfig
from megarl.data.batch import TokenBatch
from megarl.rollout.advantages import compute_advantages, compute_importance_weights, keep_highest_entropies
from megarl.rollout.batch import RLBatch
from megarl.rollout.gap import gap_metrics_before, known_gap
from megarl.rollout.metrics import data_source_metrics, reward_metrics, staleness_metrics, update_metrics
from megarl.rollout.stitch import ModelCall, stitch
from megarl.rollout.weights import assign_token_weights
from megarl.tracking.metrics import Max, Mean, Metric, Sum
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


def advantages(trajectories: list[Trajectory], changed: Recipe, kl_coefficient: float = 0.0) -> list[list[float]]:
    """Each sequence's, without its prompt; policy log-probs of the trainer are those of the engine less 1/2."""
    batch = batch_of(trajectories, changed)
    rollout_logprobs = batch.per_token["rollout_logprobs"]
    batch.per_token |= {"old_logprobs": rollout_logprobs - np.float32(0.5), "reference_logprobs": rollout_logprobs}
    compute_advantages(batch, changed, kl_coefficient)
    return [found[2:] for found in of_sequences(batch, "advantages")]


def test_groups_become_flat_arrays() -> None:
    trajectories = [attempt(0, 1.0, 2), attempt(0, -1.0, 1, prompt=3), attempt(1, 5.0, 2), attempt(1, 5.0, 1)]
    batch = batch_of(trajectories)
    assert batch.token_ids[:8].tolist() == [10, 11, 50, 51, 10, 11, 12, 50] and batch.token_ids.dtype == np.int64
    assert batch.cu_seqlens.tolist() == [0, 4, 8, 12, 15] and batch.samples.tolist() == [0, 1, 2, 3]
    assert batch.loss_mask[:8].tolist() == [False, False, True, True, False, False, False, True]
    assert of_sequences(batch, "rollout_logprobs")[0] == [0, 0, -1, -2]
    assert batch.rewards.tolist() == [1, -1, 5, 5] and batch.groups.tolist() == [0, 0, 1, 1]
    assert batch.num_sampled.tolist() == [2, 1, 2, 1] and batch.is_correct.tolist() == [True, False, True, True]
    assert compute_advantages(batch, recipe(), 0.0) == {}
    first, second, third, _ = of_sequences(batch, "advantages")
    # Rewards 1 and -1: the mean is 0, the unbiased deviation the square root of 2.
    assert first == pytest.approx([0, 0, 0.70710, 0.70710], abs=1e-5)
    assert second == pytest.approx([0, 0, 0, -0.70710], abs=1e-5) and third == [0, 0, 0, 0]
    assert {array.dtype for array in batch.per_token.values()} == {np.dtype(np.float32)}


FOUR = [attempt(4, 3.0, 1), attempt(4, 0.0, 2), attempt(9, 1.0, 1), attempt(9, 2.0, 1)]
CENTRED = {"normalize_by_std": False}
SEVERAL_TURNS = {"rollout": {"environment": "games.py:Game"}}


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
        pytest.param(
            CENTRED | {"overlong_buffer": 15, "overlong_penalty": 3.0},
            [[1.5 + 1 / 10], [-1.5 - 1 / 10] * 2, [-0.5], [0.5]],
            id="overlength, three times as dear",
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


def turns(group: int, rewards: Sequence[float], beside: float = 0.0, is_scored: bool = True) -> Trajectory:
    """A trajectory of two tokens a turn, a token of context before each; each turn's reward, and one for all."""
    of_tokens = np.concatenate([[-1, turn, turn] for turn in range(len(rewards))]).astype(np.int16)
    mask = of_tokens >= 0
    segment = Segment(
        np.arange(len(mask)), mask, np.zeros(len(mask), np.float32), np.where(mask, 1, -1).astype(np.int32), of_tokens
    )
    reward = Reward(sum(rewards) + beside, True, True) if is_scored else None
    return Trajectory(
        "game", Problem(group, (), (), "7"), group, 0, (segment,), reward, turn_rewards=tuple(enumerate(rewards))
    )


def test_returns_of_turns() -> None:
    rewards = torch.tensor([[0.2, 1.0]])
    assert turn_returns(rewards, 1.0).tolist() == [pytest.approx([1.2, 1.0])]
    assert turn_returns(rewards, 0.5).tolist() == [pytest.approx([0.7, 1.0])]
    three = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0]])
    assert turn_returns(three, 0.5).tolist() == [[3.0, 4.0, 4.0], [3.0, 0.0, 0.0]]
    assert turn_returns(torch.zeros(2, 0), 0.5).shape == (2, 0)


@pytest.mark.parametrize(
    ("discount", "trajectories", "expected"),
    [
        # Returns 1.2 and 1.0 against 0.4 and 0.2: the means are 0.8 and 0.6.
        pytest.param(1.0, [turns(0, [0.2, 1.0]), turns(0, [0.2, 0.2])], [[0.4, 0.4], [-0.4, -0.4]], id="1"),
        # Returns 0.7 and 1.0 against 0.3 and 0.2: the means are 0.5 and 0.6.
        pytest.param(0.5, [turns(0, [0.2, 1.0]), turns(0, [0.2, 0.2])], [[0.2, 0.4], [-0.2, -0.4]], id="a half"),
        # Returns 2, 1 against 1: only the first turn is of both, the second has what the whole trajectory has.
        pytest.param(1.0, [turns(0, [1.0, 1.0]), turns(0, [1.0])], [[0.5, 0.5], [-0.5]], id="turns that one lacks"),
        # A sibling that was not scored is no sibling: both turns are compared.
        pytest.param(
            0.5,
            [turns(0, [0.2, 1.0]), turns(0, [9.0], is_scored=False), turns(0, [0.2, 0.2])],
            [[0.2, 0.4], [0.0], [-0.2, -0.4]],
            id="not scored",
        ),
        # What a reward function gave counts at the last turn: returns 0.5 * 2 and 2 against 0 and 0.
        pytest.param(0.5, [turns(0, [0.0, 0.0], 2.0), turns(0, [0.0, 0.0])], [[0.5, 1.0], [-0.5, -1.0]], id="beside"),
        # The groups are apart: the second has one turn only.
        pytest.param(
            1.0,
            [turns(0, [0.0, 3.0]), turns(0, [0.0, 1.0]), turns(1, [4.0]), turns(1, [2.0])],
            [[1.0, 1.0], [-1.0, -1.0], [1.0], [-1.0]],
            id="groups",
        ),
    ],
)
def test_turns_have_advantages_of_their_own(
    discount: float, trajectories: list[Trajectory], expected: list[list[float]]
) -> None:
    batch = batch_of(trajectories)
    compute_advantages(batch, recipe(algorithm=CENTRED | {"turn_discount": discount}, **SEVERAL_TURNS), 0.0)
    for found, of_turns in zip(of_sequences(batch, "advantages"), expected, strict=True):
        assert found == pytest.approx([x for one in of_turns for x in (0.0, one, one)], abs=1e-6)


def test_without_a_discount_all_turns_share_the_trajectory_s_advantage() -> None:
    batch = batch_of([turns(0, [0.2, 1.0]), turns(0, [0.2, 0.2])])
    compute_advantages(batch, recipe(algorithm=CENTRED), 0.0)
    first, second = of_sequences(batch, "advantages")
    assert first == pytest.approx([0, 0.4, 0.4] * 2) and second == pytest.approx([0, -0.4, -0.4] * 2)


def test_truncated_completions_are_masked() -> None:
    changed = recipe(algorithm={"mask_truncated": True, "kl_coefficient": 1.0, "kl_placement": "advantage"})
    answers = [attempt(0, 1.0, 2, "length"), attempt(0, 0.0, 2)]
    batch = batch_of(answers, changed)
    assert np.add.reduceat(batch.loss_mask.astype(int), batch.cu_seqlens[:-1]).tolist() == [0, 2]
    assert advantages(answers, changed)[0] == [0, 0]


def test_corrections_weigh_tokens() -> None:
    batch = batch_of([attempt(0, 1.0, 2)])
    # Ratios of e^(1/2) on the first token and e^2 on the second, cut to 2.
    batch.per_token["old_logprobs"] = np.array([0, 0, -0.5, 0], np.float32)
    metrics = compute_importance_weights(batch, AlgorithmConfig.model_validate({"importance_sampling": "tis"}))
    assert batch.per_token["importance_weights"].tolist() == pytest.approx([0, 0, 1.648721, 2])
    assert metrics == pytest.approx({"importance/mean": 1.824361, "importance/rejected": 0, "importance/cut": 0.5})


def judged(group: int, scores: dict[str, float | None], total: float) -> Trajectory:
    return replace(attempt(group, 1.0, 2), reward=Reward(total, True, True, scores=scores))


def test_scores_are_normalised_one_by_one_and_then_summed() -> None:
    """Against the formula in float64; a function that has no opinion of a sample is left out of its group there."""
    table = {
        "boxed": [[1.0, 0.0, 0.0, 1.0], [10.0, 10.0, 10.0, 10.0], [0.0, 1.0, 0.0, 0.0]],
        "own.py:length": [[-100.0, -300.0, -250.0, -50.0], [-7.0, -9.0, -8.0, -1.0], [-5.0, None, -6.0, -8.0]],
    }
    weights = {"boxed": 1.0, "length": 0.25}
    changed = recipe(
        algorithm={"reward_order": "normalize_then_sum"},
        reward={"functions": ["boxed", {"name": "own.py:length", "weight": 0.25}]},
    )
    trajectories = []
    for group in range(3):
        for sample in range(4):
            scores = {name.partition(":")[2] or name: columns[group][sample] for name, columns in table.items()}
            total = sum(weights[name] * score for name, score in scores.items() if score is not None)
            trajectories.append(judged(group, scores, total))
    # One whose functions failed has zero from each, one that was not scored takes no part.
    trajectories[3] = replace(trajectories[3], reward=Reward(0.0, False, False), failure="error")
    trajectories[7] = replace(trajectories[7], reward=None, failure="timeout")
    table["boxed"][0][3] = table["own.py:length"][0][3] = 0.0
    summed = np.zeros((3, 4))
    is_scored = np.ones((3, 4), bool)
    is_scored[1, 3] = False
    for columns, weight in zip(table.values(), weights.values(), strict=True):
        for group, column in enumerate(columns):
            taken = np.array([score is not None for score in column]) & is_scored[group]
            values = np.array([score or 0.0 for score in column])[taken]
            summed[group, taken] += weight * (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    kept = summed[is_scored]
    expected = np.where(is_scored, (summed - kept.mean()) / kept.std(ddof=1), 0.0).ravel()
    found = [own[2] for own in of_sequences(_with_advantages(trajectories, changed), "advantages")]
    assert found == pytest.approx(expected.tolist(), abs=1e-5)
    # Summed first, the length's spread is all that is left of the first group.
    other = [own[2] for own in of_sequences(_with_advantages(trajectories, recipe()), "advantages")]
    assert np.abs(np.array(other) - expected).max() > 0.5


def test_a_reward_model_s_score_is_normalised_as_a_function_s() -> None:
    changed = recipe(
        algorithm={"reward_order": "normalize_then_sum"},
        reward={"functions": ["boxed"], "function_weight": 0.5, "model": "m", "model_weight": 2.0},
    )
    batch = batch_of([judged(0, {"boxed": score}, score) for score in (1.0, 0.0, 1.0)])
    batch.model_scores = np.array([3.0, 1.0, -1.0])
    compute_advantages(batch, changed, 0.0)
    own = np.array([1.0, -2.0, 1.0]) / 3 / np.std([1, 0, 1], ddof=1)
    summed = 0.5 * own + 2.0 * np.array([1.0, 0.0, -1.0])
    expected = (summed - summed.mean()) / summed.std(ddof=1)
    assert [found[2] for found in of_sequences(batch, "advantages")] == pytest.approx(expected.tolist(), abs=1e-5)


def test_rewards_of_an_environment_are_normalised_as_they_are() -> None:
    changed = recipe(
        algorithm={"reward_order": "normalize_then_sum"}, reward={"functions": ["boxed", "format"]}, **SEVERAL_TURNS
    )
    batch = _with_advantages([turns(0, [0.0, 1.0]), turns(0, [0.0, 0.0])], changed)
    # Of one group with one score nothing is changed by the second normalisation.
    assert [found[1] for found in of_sequences(batch, "advantages")] == pytest.approx([0.70710, -0.70710], abs=1e-4)


def _with_advantages(trajectories: list[Trajectory], changed: Recipe) -> RLBatch:
    batch = batch_of(trajectories)
    compute_advantages(batch, changed, 0.0)
    return batch


@pytest.mark.parametrize("correction", [None, "tis"])
def test_tokens_of_lower_entropy_have_no_policy_loss(correction: str | None) -> None:
    batch = batch_of([attempt(0, 1.0, 2), attempt(0, 0.0, 3), attempt(0, 0.0, 5, "length")])
    batch.loss_mask[-5:] = False
    batch.entropies = np.array([9, 9, 0.5, 1.5, 9, 9, 0.25, 2.5, 1.0, 9, 9, 9, 9, 9, 9, 9], np.float32)
    ratio = np.where(batch.loss_mask, np.float32(np.log(1.5)), np.float32(0))
    batch.per_token["old_logprobs"] = batch.per_token["rollout_logprobs"] + ratio
    algorithm = AlgorithmConfig.model_validate({"importance_sampling": correction, "entropy_top_share": 0.4})
    compute_importance_weights(batch, algorithm)
    # Two of five trained tokens; what is not trained does not count.
    metrics = keep_highest_entropies(batch, algorithm)
    assert metrics == pytest.approx({"entropy/threshold": 1.5, "entropy/kept": 0.4})
    factor = 1.0 if correction is None else 1.5
    kept = [[0, 0, 0, factor], [0, 0, 0, factor, 0], [0] * 7]
    for got, wanted in zip(of_sequences(batch, "importance_weights"), kept, strict=True):
        assert got == pytest.approx(wanted)
    assert batch.per_token["importance_weights"].dtype == np.float32
    batch.loss_mask[:] = False
    assert keep_highest_entropies(batch, algorithm) == {}


def test_case_16_tokens_of_earlier_weights_are_corrected_each_by_its_own_ratio() -> None:
    """Sampled by the weights of versions 3, 3, 4 and 5, trained at version 5."""
    trajectory = attempt(0, 1.0, 4)
    [segment] = trajectory.segments
    versions = np.array([-1, -1, 3, 3, 4, 5], np.int32)
    sampled = np.array([0, 0, -1.0, -2.0, -1.1, -0.9], np.float32)
    trajectory = replace(trajectory, segments=(replace(segment, weight_versions=versions, rollout_logprobs=sampled),))
    batch = batch_of([trajectory])
    batch.per_token["old_logprobs"] = np.array([0, 0, -0.9, -0.9, -0.9, -0.9], np.float32)
    corrected = AlgorithmConfig.model_validate({"importance_sampling": "tis", "importance_sampling_high": 2.0})
    compute_importance_weights(batch, corrected)
    weights = batch.per_token["importance_weights"][2:]
    assert weights.tolist() == pytest.approx([np.exp(0.1), 2.0, np.exp(0.2), 1.0])
    old = torch.from_numpy(batch.per_token["old_logprobs"][2:])
    losses, _ = clipped(torch.full((4,), -0.8), old, torch.ones(4), clip_low=0.2, clip_high=0.2)
    found = losses.numpy() * weights
    assert found.tolist() == pytest.approx([-1.221403, -2 * np.exp(0.1), -np.exp(0.3), -np.exp(0.1)])
    # Trainer and engine are compared where both had the same weights: on the last token alone.
    batch.forget_stale_logprobs(weight_version=5)
    assert np.isnan(batch.per_token["rollout_logprobs"][2:]).tolist() == [True, True, True, False]
    assert staleness_metrics([trajectory], 5) == {"staleness/mean": 2.0, "staleness/max": 2.0}


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
def test_token_weights(aggregation: Any, expected: list[list[float]]) -> None:
    found = weighed(masked("-xx", "-x-x", "--"), AlgorithmConfig(aggregation=aggregation), constant_length=10)
    for got, wanted in zip(found, expected, strict=True):
        assert got == pytest.approx(wanted)


def test_token_mean_differs_from_sequence_mean() -> None:
    tokens = weighed(masked("-xxx", "-x"), AlgorithmConfig(aggregation="token_mean"))
    assert tokens == [[0, 0.25, 0.25, 0.25], [0, 0.25]]
    means = weighed(masked("-xxx", "-x"), AlgorithmConfig(aggregation="sequence_mean_token_mean"))
    assert means[0] == pytest.approx([0, 1 / 6, 1 / 6, 1 / 6]) and means[1] == [0, 0.5]


def test_each_minibatch_has_weights_of_its_own() -> None:
    two = recipe(train={"updates_per_step": 2}, algorithm={"aggregation": "token_mean"})
    updates = rl_batch("-x", "-xxx", "-xx", "-xxxxxx").minibatches(two, 1)
    assert [update.lengths.tolist() for update in updates] == [[2, 4], [3, 7]]
    assert [sum(map(sum, weights(update))) for update in updates] == pytest.approx([1, 1])
    assert weights(updates[0])[0] == [0, 0.25] and weights(updates[1])[0] == [0, 0.125, 0.125]


def test_minibatches_divide_by_the_longest_completion() -> None:
    longest = recipe(algorithm={"aggregation": "constant_length"}, rollout={"sampling": {"max_new_tokens": 8}})
    [update] = rl_batch("-x", "-xx").minibatches(longest, 1)
    assert weights(update) == [[0, 0.0625], [0, 0.0625, 0.0625]]


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


@pytest.mark.parametrize(
    ("aggregation", "of_first", "of_second"),
    [
        ("sequence_mean_token_mean", 0.125, 0.0625),
        ("token_mean", 1 / 12, 1 / 12),
        ("sequence_mean_token_sum", 0.5, 0.5),
        ("constant_length", 0.05, 0.05),
    ],
)
def test_case_8_a_trajectory_counts_once_whatever_the_number_of_its_segments(
    aggregation: Any, of_first: float, of_second: float
) -> None:
    """One of 4 trained tokens; one with segments of 2 and 6."""
    batch = batch_of([segmented(0, 0, 1.0, "--xxxx"), segmented(0, 1, 0.0, "-xx", "---xxxxxx")])
    assert batch.samples.tolist() == [0, 1, 1]
    first, second, third = weighed(batch, AlgorithmConfig(aggregation=aggregation), constant_length=10)
    assert first == pytest.approx([0] * 2 + [of_first] * 4, abs=1e-6)
    assert second == pytest.approx([0] + [of_second] * 2, abs=1e-6)
    assert third == pytest.approx([0] * 3 + [of_second] * 6, abs=1e-6)


def test_case_9_advantages_are_those_of_trajectories() -> None:
    """Rewards 1 0 0 1 of 1, 3, 1 and 2 segments: the mean over segments would be 3/7."""
    group = [
        segmented(0, number, reward, *["-x"] * segments)
        for number, (reward, segments) in enumerate([(1.0, 1), (0.0, 3), (0.0, 1), (1.0, 2)])
    ]
    expected = [[0, 0.5]] + [[0, -0.5]] * 4 + [[0, 0.5]] * 2
    batch = batch_of(group)
    compute_advantages(batch, recipe(algorithm=CENTRED), 0.0)
    assert of_sequences(batch, "advantages") == [pytest.approx(part, abs=1e-6) for part in expected]
    # One that could not be scored changes nothing, and its tokens are not trained.
    more = batch_of([*group, segmented(0, 4, None, "-xxx")])
    compute_advantages(more, recipe(algorithm=CENTRED), 0.0)
    assert of_sequences(more, "advantages") == [*(pytest.approx(part, abs=1e-6) for part in expected), [0] * 4]
    assert not more.loss_mask[-4:].any() and more.loss_mask[:-4].sum() == 7


def test_minibatches_part_trajectories_not_their_segments() -> None:
    batch = batch_of([segmented(0, number, 1.0, *["-x"] * (number + 1)) for number in range(4)])
    two = recipe(train={"updates_per_step": 2, "epochs_per_step": 2}, algorithm={"aggregation": "token_mean"})
    batch.per_token["advantages"] = batch.samples.repeat(2).astype(np.float32)
    updates = batch.minibatches(two, 1)
    first, second = updates[:2]
    assert first.samples.tolist() == [0, 1, 1] and second.samples.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert weights(first) == [[0, pytest.approx(1 / 3)]] * 3 and weights(second)[0][1] == pytest.approx(1 / 7)
    for one, other in (updates[:2], updates[2:]):
        both = np.concatenate([one.per_token["advantages"], other.per_token["advantages"]])
        assert np.bincount(both.astype(int)).tolist() == [2, 4, 6, 8]


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


def test_trajectories_that_waited_keep_where_their_ratio_starts() -> None:
    def of_version(trajectory: Trajectory, version: int, old: list[float] | None = None) -> Trajectory:
        [segment] = trajectory.segments
        versions = np.where(segment.loss_mask, version, -1).astype(np.int32)
        old_logprobs = None if old is None else np.array(old, np.float32)
        return replace(trajectory, segments=(replace(segment, weight_versions=versions, old_logprobs=old_logprobs),))

    fresh = of_version(attempt(0, 1.0, 2), 3)
    waited = of_version(attempt(0, 0.0, 1), 1, [0, 0, -7])
    batch = batch_of([fresh, waited])
    now, then = of_sequences(batch, "old_logprobs")
    assert now == pytest.approx([0, 0, np.nan, np.nan], nan_ok=True) and then == [0, 0, -7]
    assert batch.per_token["old_logprobs"].dtype == np.float32
    assert of_sequences(batch, "rollout_logprobs")[1] == [0, 0, -1]
    assert "old_logprobs" not in batch_of([fresh]).per_token
    assert staleness_metrics([fresh, waited], 3) == {"staleness/mean": 1.0, "staleness/max": 2.0}

    engine = recipe(algorithm={"old_logprobs": "rollout"}, train={"updates_per_step": 2})
    batch = batch_of([fresh, of_version(waited, 1), fresh, of_version(waited, 1)])
    batch.start_from_rollout(3)
    assert [found[2] for found in of_sequences(batch, "old_logprobs")] == [-1, -1, -1, -1]
    # Compared are log-probs of equal weights alone: no trajectory's that waited, none's after the first update.
    compared = [[not np.isnan(found).any() for found in of_sequences(batch, "rollout_logprobs")]]
    for update in batch.minibatches(engine, 3):
        compared.append([not np.isnan(found).any() for found in of_sequences(update, "rollout_logprobs")])
    assert compared == [[True, False, True, False], [True, False], [False, False]]


def test_each_pass_visits_all_sequences_in_an_order_of_its_own() -> None:
    batch = rl_batch(*("-" + "x" * length for length in range(1, 9)))

    def lengths(step: int, seed: int = 5, **train: int) -> list[list[int]]:
        updates = batch.minibatches(recipe(train=train, seed=seed), step)
        assert [sum(map(sum, weights(update))) for update in updates] == pytest.approx([1] * len(updates))
        return [(update.lengths - 1).tolist() for update in updates]

    once = lengths(1, updates_per_step=2)
    assert once == [[1, 2, 3, 4], [5, 6, 7, 8]]
    thrice = lengths(1, updates_per_step=2, epochs_per_step=3)
    assert thrice[:2] == once and len(thrice) == 6
    passes = [[*thrice[i], *thrice[i + 1]] for i in (0, 2, 4)]
    assert all(sorted(one) == passes[0] for one in passes) and len(set(map(tuple, passes))) == 3
    assert thrice == lengths(1, updates_per_step=2, epochs_per_step=3)
    assert thrice[2:] != lengths(2, updates_per_step=2, epochs_per_step=3)[2:]
    assert thrice[2:] != lengths(1, seed=6, updates_per_step=2, epochs_per_step=3)[2:]
    assert [len(update) for update in lengths(1, epochs_per_step=2)] == [8, 8]


def test_each_pass_learns_all_conversations_beside() -> None:
    twice = recipe(algorithm={"ptx_coefficient": 0.5}, train={"updates_per_step": 2, "epochs_per_step": 2})
    updates = rl_batch("-x", "-xx").minibatches(twice, 1, masked("-xxx", "-xxxx"))
    assert [update.lengths[-1] for update in updates] == [4, 5, 4, 5]


def test_accuracy_is_of_the_same_samples_with_and_without_a_reward_model() -> None:
    drawn = [attempt(0, 1.0, 3), attempt(0, -1.0, 5, "length"), attempt(1, -1.0, 1), attempt(1, -1.0, 7)]
    kept = [attempt(0, 10.0, 3), attempt(0, -10.0, 5, "length")]
    alone, beside = reward_metrics(drawn), reward_metrics(drawn, kept=kept)
    of_the_reward = {"reward/mean": 0.0, "reward/std": 10.0, "reward/zero_variance_groups": 0.0}
    of_the_reward |= {"reward/min": -10.0, "reward/max": 10.0}
    assert beside == alone | of_the_reward and alone["reward/accuracy"] == 0.25


def test_reward_metrics() -> None:
    metrics = reward_metrics(
        [attempt(0, 2.0, 3), attempt(0, 0.0, 5, "length"), attempt(1, -1.0, 1), attempt(1, -1.0, 7, "length")]
    )
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.0,
            "reward/std": 1.2247449,
            "reward/min": -1.0,
            "reward/max": 2.0,
            "reward/accuracy": 0.25,
            "reward/format_valid": 0.5,
            "reward/zero_variance_groups": 0.5,
            "rollout/completion_tokens/mean": 4.0,
            "rollout/completion_tokens/max": 7.0,
            "rollout/truncated": 0.5,
        }
    )


def test_metrics_by_the_data_source_of_a_record() -> None:
    def of(source: object, score: float) -> Trajectory:
        made = attempt(0, score, 3)
        return replace(made, problem=replace(made.problem, record={"extra": {"source": source}}))

    found = [of("math", 2.0), of("math", 0.0), of("code/x", 1.0), of(None, 5.0), replace(of("code/x", 0), reward=None)]
    metrics = data_source_metrics(found, "extra.source")
    assert {name: metrics[f"reward/source/{name}"] for name in ("math/mean", "math/count", "code_x/count")} == {
        "math/mean": 1.0, "math/count": 2.0, "code_x/count": 1.0,
    }  # fmt: skip
    assert len(metrics) == 8 and data_source_metrics(found, None) == {} == data_source_metrics(found, "data_source")


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
    batch = batch_of([attempt(0, 2.0, 2), attempt(0, 7.0, 1)])
    rollout_logprobs = batch.per_token["rollout_logprobs"]
    batch.per_token |= {"old_logprobs": rollout_logprobs - np.float32(0.5), "reference_logprobs": rollout_logprobs}
    batch.per_token["values"] = np.array([9, 9, 1, 3, 9, 9, 7], np.float32)
    metrics = compute_advantages(batch, changed, kl_coefficient)
    assert of_sequences(batch, "advantages")[0][2:] == pytest.approx(expected)
    assert of_sequences(batch, "returns")[0][2:] == pytest.approx(returns)
    assert of_sequences(batch, "returns")[1][2:] == pytest.approx([7 + kl_coefficient / 2])
    assert metrics["critic/value"] == pytest.approx(11 / 3)
    assert metrics["critic/return"] == pytest.approx((sum(returns) + 7 + kl_coefficient / 2) / 3)
    if not kl_coefficient:
        # Returns 2.5, 2, 7 lie 1.5, -1, 0 from the values.
        unforeseen, variance = np.var([1.5, -1.0, 0.0]), np.var([2.5, 2.0, 7.0])
        assert metrics["critic/explained"] == pytest.approx(1 - unforeseen / variance)
    [whole] = batch.critic_minibatches(changed)
    assert weights(whole) == [[0, 0, pytest.approx(1 / 3), pytest.approx(1 / 3)], [0, 0, pytest.approx(1 / 3)]]
    assert whole.per_token.keys() == {"values", "returns", "token_weights"}
    assert whole.per_token["values"].tolist() == [9, 9, 1, 3, 9, 9, 7]
    halves = batch.critic_minibatches(recipe(algorithm=PPO, critic={"updates_per_step": 2}))
    assert [weights(half) for half in halves] == [[[0, 0, 0.5, 0.5]], [[0, 0, 1]]]


def test_conversations_make_their_share_of_the_loss() -> None:
    changed = recipe(algorithm={"ptx_coefficient": 0.25, "aggregation": "token_mean"}, train={"updates_per_step": 2})
    batch = rl_batch(".xx", ".x.")
    batch.per_token["advantages"] = np.full(6, 5, np.float32)
    first, second = batch.minibatches(changed, 1, masked(".xx", "..xxxx", ".xx"))
    # 3/4 for the update's own tokens, 1/4 for those of its conversations: the first and third here, the second there.
    assert weights(first) == [[0, 0.375, 0.375], [0, 0.0625, 0.0625], [0, 0.0625, 0.0625]]
    assert weights(second) == [[0, 0.75, 0], [0, 0, 0.0625, 0.0625, 0.0625, 0.0625]]
    assert of_sequences(second, "supervised") == [[0] * 3, [1] * 6]
    # All sequences of a row carry the same arrays.
    assert of_sequences(second, "advantages") == [[5] * 3, [0] * 6] and "old_logprobs" not in second.per_token
    assert second.samples.tolist() == [0, 1]


def test_a_lone_sample_and_masked_sequences_count_as_the_recipe_says() -> None:
    changed = recipe(algorithm={"lone_sample": "reward", "normalize_by_std": False, "mask_truncated": True})
    batch = batch_of([attempt(0, 3.0, 1), attempt(1, 4.0, 2, "length")], changed)
    compute_advantages(batch, changed, 0.0)
    assert of_sequences(batch, "advantages") == [[0, 0, 3], [0, 0, 0, 0]]
    counted = AlgorithmConfig(aggregation="constant_length", count_masked_sequences=True)
    for algorithm, of_a_token in ((counted, 1 / 20), (AlgorithmConfig(aggregation="constant_length"), 1 / 10)):
        assert weighed(batch, algorithm, 10)[0] == pytest.approx([0, 0, of_a_token])


def test_a_gap_is_known_before_the_update_where_all_old_logprobs_are() -> None:
    """Three trained tokens, 0.1, 0.2 and 0.6 nats apart; a prompt's token is not among them."""
    batch = rl_batch("-xx", "x")
    batch.per_token["rollout_logprobs"] = np.array([-9.0, -1.0, -2.0, -3.0], np.float32)
    assert known_gap(batch) is None
    batch.per_token["old_logprobs"] = np.array([0.0, -1.1, -1.8, -2.4], np.float32)
    assert known_gap(batch) == pytest.approx(0.3)
    assert gap_metrics_before(batch, TrainConfig(max_logprob_gap=0.31)) == {}
    expected = {"train/gap_exceeded": 1.0, "logprob_gap/mean": pytest.approx(0.3)}
    assert gap_metrics_before(batch, TrainConfig(max_logprob_gap=0.29)) == expected
    assert gap_metrics_before(batch, TrainConfig()) == {}
    batch.per_token["old_logprobs"][2] = np.nan
    assert known_gap(batch) is None
