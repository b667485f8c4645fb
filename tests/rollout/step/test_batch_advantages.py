"""Advantages and corrections of a batch: numbers worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.advantages import token_rewards, turn_returns
from megarl.config import AlgorithmConfig, Recipe
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.advantages import compute_advantages, compute_importance_weights, keep_highest_entropies
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.scoring import add_model_scores
from megarl.types import ConfigError, Problem, Reward, Segment, Trajectory
from tests.rollout.batches import attempt, batch_of, of_sequences, recipe, segmented, weights


def advantages(trajectories: list[Trajectory], changed: Recipe, kl_coefficient: float = 0.0) -> list[list[float]]:
    """Each sequence's, without its prompt; policy log-probs of the trainer are those of the engine less 1/2."""
    batch = batch_of(trajectories, changed)
    rollout_logprobs = batch.per_token["rollout_logprobs"]
    batch.per_token |= {"old_logprobs": rollout_logprobs - np.float32(0.5), "reference_logprobs": rollout_logprobs}
    compute_advantages(batch, changed, kl_coefficient)
    return [found[2:] for found in of_sequences(batch, "advantages")]


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


def turns(group: int, rewards: Sequence[float], whole: float = 0.0, is_scored: bool = True) -> Trajectory:
    """A trajectory of two tokens a turn, a token of context before each; each turn's reward, and one for all."""
    of_tokens = np.concatenate([[-1, turn, turn] for turn in range(len(rewards))]).astype(np.int16)
    mask = of_tokens >= 0
    segment = Segment(
        np.arange(len(mask)), mask, np.zeros(len(mask), np.float32), np.where(mask, 1, -1).astype(np.int32), of_tokens
    )
    reward = Reward(sum(rewards) + whole, True, True) if is_scored else None
    return Trajectory(
        "game", Problem(group, (), (), "7"), group, 0, (segment,), reward, turn_rewards=tuple(enumerate(rewards))
    )


def episode(random: np.random.Generator, group: int, *, first_is_empty: bool = False) -> Trajectory:
    """A trajectory of random turns in one or two segments, some turns without a token, some without a reward."""
    counts = random.integers(0, 4, random.integers(1, 5))
    counts[0] = 0 if first_is_empty else max(counts[0], 1)
    counts[-1] = max(counts[-1], 1)
    parts = np.split(np.arange(len(counts)), random.integers(1, len(counts) + 1, 1))
    segments = []
    for part in parts:
        of_tokens = np.concatenate([[-1] * random.integers(1, 3) + [turn] * counts[turn] for turn in part] or [[-1]])
        mask = of_tokens >= 0
        zeros = np.zeros(len(mask), np.float32)
        versions = np.where(mask, 1, -1).astype(np.int32)
        segments.append(Segment(np.arange(len(mask)), mask, zeros, versions, of_tokens.astype(np.int16)))
    rewards = tuple((turn, float(random.normal())) for turn in range(len(counts)) if random.random() < 0.8)
    # The rest is what a reward model adds for the whole attempt.
    score = sum(reward for _, reward in rewards) + float(random.normal())
    reward = None if random.random() < 0.2 else Reward(score, True, True)
    return Trajectory("game", Problem(group, (), (), "7"), group, 0, tuple(segments), reward, turn_rewards=rewards)


def gae_by_recursion(trajectory: Trajectory, values: Sequence[float], gamma: float, factor: float) -> list[float]:
    """The advantages of an attempt's sampled tokens, in order, by the definition in float64."""
    turns = [int(turn) for segment in trajectory.segments for turn in segment.turns[segment.loss_mask]]
    assert trajectory.reward is not None
    rewards = [0.0] * len(turns)
    rewards[-1] += trajectory.reward.score - sum(reward for _, reward in trajectory.turn_rewards)
    for turn, reward in trajectory.turn_rewards:
        # Tokens are in the order of turns. Before the first token there is no action to reward.
        before = [place for place, of in enumerate(turns) if of <= turn]
        rewards[before[-1] if before else -1] += reward
    advantages = [0.0] * (len(turns) + 1)
    following = [*values[1:], 0.0]
    for place in reversed(range(len(turns))):
        delta = rewards[place] + gamma * following[place] - values[place]
        advantages[place] = delta + gamma * factor * advantages[place + 1]
    return advantages[:-1]


@pytest.mark.parametrize(("gamma", "factor"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.7, 0.0)])
def test_gae_gives_each_turn_its_own_reward(gamma: float, factor: float) -> None:
    random = np.random.default_rng(17)
    trajectories = [episode(random, group, first_is_empty=group % 5 == 4) for group in range(60)]
    batch = batch_of(trajectories)
    batch.per_token["values"] = random.normal(size=len(batch.token_ids)).astype(np.float32)
    changed = recipe(
        algorithm={"advantage": "gae", "gamma": gamma, "gae_lambda": factor}, critic={"path": "c"}, **SEVERAL_TURNS
    )
    compute_advantages(batch, changed, 0.0)
    sample = batch.samples.repeat(batch.lengths)
    for number, trajectory in enumerate(trajectories):
        is_own = (sample == number) & (batch.turns >= 0)
        found = batch.per_token["advantages"][is_own]
        if trajectory.reward is None:
            assert not found.any()
            continue
        expected = gae_by_recursion(trajectory, batch.per_token["values"][is_own].tolist(), gamma, factor)
        assert found == pytest.approx(expected, abs=2e-6)
        returns = batch.per_token["returns"][is_own]
        assert returns == pytest.approx(batch.per_token["values"][is_own] + expected, abs=4e-6)


def test_rewards_of_turns_that_cancel_have_returns() -> None:
    batch = batch_of([turns(0, [1.0, -1.0])])
    batch.per_token["values"] = np.zeros(6, np.float32)
    compute_advantages(batch, recipe(algorithm={"advantage": "gae", "gae_lambda": 1.0}, critic={"path": "c"}), 0.0)
    assert of_sequences(batch, "returns") == [[0, 0, 0, 0, -1, -1]]
    assert of_sequences(batch, "advantages") == [[0, 0, 0, 0, -1, -1]]


def test_a_reward_of_a_later_turn_that_is_not_trained_goes_to_the_turns_before_it() -> None:
    """An agent's program may reward a call of `rollout.agent.untrained_kinds`, such as a summary at its end."""
    groups = [[turns(0, [1.0]), turns(0, [0.0])]]
    groups[0][1] = replace(groups[0][1], turn_rewards=((0, 0.0), (2, 4.0)), reward=Reward(4.0, True, True))
    batch = batch_of(groups[0])
    batch.per_token["values"] = np.zeros(6, np.float32)
    compute_advantages(batch, recipe(algorithm={"advantage": "gae", "gae_lambda": 1.0}, critic={"path": "c"}), 0.0)
    assert of_sequences(batch, "returns") == [[0, 1, 1], [0, 4, 4]]
    discounted = recipe(algorithm={"turn_discount": 0.5, "normalize_by_std": False}, **SEVERAL_TURNS)
    compute_advantages(batch, discounted, 0.0)
    # Returns 1 and 0.5 * 0.5 * 4: equal.
    assert of_sequences(batch, "advantages") == [[0, 0, 0]] * 2


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_reward_model_leaves_the_environment_its_weight_in_each_turn(weight: float) -> None:
    """The model's score and `reward.function_weight` times the turns' rewards, wherever turns count singly."""
    groups = [[turns(0, [1.0, -1.0]), turns(0, [0.0, 2.0])]]
    reward = {"functions": ["boxed"], "function_weight": weight, "model": "m"}

    def with_scores(algorithm: dict[str, Any], **sections: Any) -> RLBatch:
        batch = RLBatch.from_groups(groups)
        batch.per_token["values"] = np.zeros(len(batch.token_ids), np.float32)
        changed = recipe(algorithm=algorithm, reward=reward, **SEVERAL_TURNS, **sections)
        model: Any = SimpleNamespace(forward=_constant_scores)
        asyncio.run(add_model_scores(groups, batch, model, changed.reward))
        compute_advantages(batch, changed, 0.0)
        return batch

    returns = with_scores({"advantage": "gae", "gae_lambda": 1.0}, critic={"path": "c"}).per_token["returns"]
    model_score = 3.0
    first = [model_score, model_score - weight]
    second = [model_score + 2 * weight, model_score + 2 * weight]
    assert returns.reshape(4, 3)[:, 1:].ravel().tolist() == pytest.approx([x for x in first + second for _ in (0, 1)])
    singly = with_scores(CENTRED | {"turn_discount": 1.0}).per_token["advantages"].reshape(4, 3)[:, 1]
    assert singly.tolist() == pytest.approx([-weight, -1.5 * weight, weight, 1.5 * weight])


async def _constant_scores(batch: TokenBatch) -> np.ndarray:
    return np.full(len(batch.token_ids), 3.0, np.float32)


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
        pytest.param(0.5, [turns(0, [0.0, 0.0], 2.0), turns(0, [0.0, 0.0])], [[0.5, 1.0], [-0.5, -1.0]], id="whole"),
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


def test_a_group_with_too_few_scored_attempts_for_pass_at_k_has_no_advantage_and_is_counted() -> None:
    """One attempt of the first group was not scored, which leaves fewer than k; the second group learns."""
    whole = [turns(1, [1.0]), turns(1, [0.0]), turns(1, [0.0])]
    batch = batch_of([turns(0, [1.0]), turns(0, [0.0], is_scored=False), *whole])
    metrics = compute_advantages(batch, recipe(algorithm={"advantage": "pass_at_k", "pass_k": 2}), 0.0)
    found = [max(map(abs, one)) for one in of_sequences(batch, "advantages")]
    assert found[:2] == [0.0, 0.0] and all(value >= 0 for value in found[2:])
    assert metrics["advantages/groups_below_k"] == 1.0


def test_without_a_discount_all_turns_share_the_trajectory_s_advantage() -> None:
    batch = batch_of([turns(0, [0.2, 1.0]), turns(0, [0.2, 0.2])])
    compute_advantages(batch, recipe(algorithm=CENTRED), 0.0)
    first, second = of_sequences(batch, "advantages")
    assert first == pytest.approx([0, 0.4, 0.4] * 2) and second == pytest.approx([0, -0.4, -0.4] * 2)


def test_rewards_are_centred_before_they_are_rounded() -> None:
    """2^24 and 2^24 + 1 are one number in float32."""
    large = [attempt(0, 16777216.0, 1), attempt(0, 16777217.0, 1)]
    assert advantages(large, recipe(algorithm=CENTRED)) == [[-0.5], [0.5]]
    large = [turns(0, [16777216.0]), turns(0, [16777217.0])]
    batch = _with_advantages(large, recipe(algorithm=CENTRED | {"turn_discount": 1.0}, **SEVERAL_TURNS))
    assert [found[1:] for found in of_sequences(batch, "advantages")] == [[-0.5, -0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("limit", "budget", "penalty"),
    [
        pytest.param(3, None, 0.0, id="turns below the limit of one"),
        pytest.param(2, None, 1.0, id="turns at the limit"),
        pytest.param(16, 7, 0.0, id="all together below their limit"),
        pytest.param(16, 6, 1.0, id="all together at their limit"),
    ],
)
def test_the_longest_turn_is_punished_not_the_sum(limit: int, budget: int | None, penalty: float) -> None:
    """Three turns of 2 tokens each, and an attempt of one token; the buffer is one token."""
    changed = recipe(
        algorithm=CENTRED | {"overlong_buffer": 1},
        rollout={
            "environment": "games.py:Game",
            "sampling": {"max_new_tokens": limit},
            "budget": {"sampled_tokens": budget},
        },
    )
    batch = _with_advantages([turns(0, [0.0, 0.0, 1.0]), attempt(0, 0.0, 1)], changed)
    assert batch.longest_turns.tolist() == [2, 1]
    assert batch.per_token["advantages"][1] == pytest.approx((1 - penalty) / 2)


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
    assert metrics == pytest.approx(
        {"importance/mean": 1.824361, "importance/rejected": 0, "importance/clipped_share": 0.5}
    )


def test_an_advantage_of_the_user_s_own_that_returns_another_form_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def of_groups(rewards, groups, *, gamma):\n    return rewards[:1] * gamma\n")
    changed = recipe(algorithm={"advantage": "own.py:of_groups"})
    with pytest.raises(
        ConfigError, match=r"^algorithm\.advantage = own\.py:of_groups: the function returned a tensor \[1\] of"
    ):
        _with_advantages([attempt(0, 1.0, 2), attempt(0, 0.0, 2)], changed)


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
    assert metrics == pytest.approx({"entropy/threshold": 1.5, "entropy/trained_share": 0.4})
    factor = 1.0 if correction is None else 1.5
    kept = [[0, 0, 0, factor], [0, 0, 0, factor, 0], [0] * 7]
    for got, wanted in zip(of_sequences(batch, "importance_weights"), kept, strict=True):
        assert got == pytest.approx(wanted)
    assert batch.per_token["importance_weights"].dtype == np.float32
    batch.loss_mask[:] = False
    assert keep_highest_entropies(batch, algorithm) == {}


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


def test_a_turn_without_trained_tokens_gives_its_reward_once() -> None:
    """Its reward and that of the turn before cancel there: nothing is left for the first turn."""
    scores, turn_rewards = torch.tensor([0.0]), torch.tensor([[0.0, -1.0, 1.0]])
    turns, mask = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([False, True, True, True, False])
    rewards = token_rewards(scores, turn_rewards, turns, torch.tensor([0, 5]), mask)
    assert rewards.tolist() == [0.0] * 5
