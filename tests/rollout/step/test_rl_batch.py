"""Trajectories to batches, weights, minibatches and metrics: numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.importance import mismatch_moments
from megarl.algorithms.policy_losses import clipped
from megarl.config import AlgorithmConfig
from megarl.rollout.step.advantages import compute_advantages, compute_importance_weights
from megarl.rollout.step.rl_batch import RLBatch, split_evenly
from megarl.rollout.step.step_metrics import (
    data_source_metrics,
    reward_metrics,
    staleness_metrics,
)
from megarl.rollout.step.updates import (
    PolicyUpdates,
    excess_mismatch,
    merge_updates,
    mismatch_before_update,
    update_metrics,
)
from megarl.tracking.metrics import Max, Mean, Metric, Sum
from megarl.tracking.outcomes import StepOutcome, Update, UpdateOutcome
from megarl.types import NO_EXPERTS, ExpertsHandle, MegarlError, Trajectory
from tests.rollout.batches import attempt, batch_of, masked, of_sequences, recipe, rl_batch, segmented, weighed, weights


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

    # A group that waited since before a resume may have another number of samples.
    updates = rl_batch("-x", "-xxx", "-xx", "-xxxxxx", "-x").minibatches(two, 1)
    assert [update.lengths.tolist() for update in updates] == [[2, 4, 3], [7, 2]]


def test_minibatches_divide_by_the_longest_completion() -> None:
    longest = recipe(algorithm={"aggregation": "constant_length"}, rollout={"sampling": {"max_new_tokens": 8}})
    [update] = rl_batch("-x", "-xx").minibatches(longest, 1)
    assert weights(update) == [[0, 0.0625], [0, 0.0625, 0.0625]]


@pytest.mark.parametrize(
    ("rollout", "longest"),
    [
        pytest.param({"max_turns": 2}, 16, id="turns times tokens"),
        pytest.param({"max_turns": 16}, 24, id="room of one sequence"),
        pytest.param({"max_turns": 16, "history": "render"}, 128, id="sequences of their own"),
        pytest.param({"budget": {"sampled_tokens": 20}}, 20, id="budget"),
        pytest.param({"environment": "single_turn"}, 8, id="one turn"),
    ],
)
def test_minibatches_divide_by_the_longest_trajectory(rollout: dict[str, Any], longest: int) -> None:
    changed = recipe(
        algorithm={"aggregation": "constant_length"},
        data={"train": "t", "max_prompt_tokens": 16},
        rollout={"environment": "games.py:Game", "max_turns": 4, "sampling": {"max_new_tokens": 8}} | rollout,
    )
    [update] = rl_batch("-x", "-xx").minibatches(changed, 1)
    assert weights(update)[0][1] == pytest.approx(1 / (2 * longest))


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


def test_the_mismatch_is_that_of_all_updates() -> None:
    def update(mismatch: float, loss: float, tokens: float) -> dict[str, Metric]:
        moments = mismatch_moments(torch.tensor([-1.0 - mismatch]), torch.tensor([-1.0]))
        found: dict[str, Metric] = {f"logprob_gap/{n}": Mean(float(v), tokens) for n, v in moments.items()}
        return found | {
            "logprob_gap/max": Max(mismatch),
            "logprob_gap/measured": Mean(1.0, tokens),
            "train/loss": Sum(loss),
        }

    metrics = update_metrics([update(0.5, 1.0, 3.0), update(0.1, 2.0, 1.0)])
    assert metrics["train/loss"] == 1.5 and metrics["logprob_gap/max"] == 0.5
    assert metrics["logprob_gap/mean"] == pytest.approx(0.4) and metrics["logprob_gap/measured"] == 1.0
    assert metrics["logprob_gap/perplexity_ratio"] == pytest.approx(np.exp(0.4))
    assert {"logprob_gap/ess", "logprob_gap/correlation"} <= metrics.keys() and "logprob_gap/product" not in metrics
    assert merge_updates([update(0.5, 1.0, 3.0), update(0.1, 2.0, 1.0)])["train/loss"] == Mean(1.5, 2.0)
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
    batch.use_engine_logprobs_as_old(3)
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


def test_each_pass_learns_all_conversations_too() -> None:
    twice = recipe(algorithm={"ptx_coefficient": 0.5}, train={"updates_per_step": 2, "epochs_per_step": 2})
    updates = rl_batch("-x", "-xx").minibatches(twice, 1, masked("-xxx", "-xxxx"))
    assert [update.lengths[-1] for update in updates] == [4, 5, 4, 5]


def test_accuracy_is_of_the_same_samples_with_and_without_a_reward_model() -> None:
    drawn = [attempt(0, 1.0, 3), attempt(0, -1.0, 5, "length"), attempt(1, -1.0, 1), attempt(1, -1.0, 7)]
    kept = [attempt(0, 10.0, 3), attempt(0, -10.0, 5, "length")]
    alone, with_model = reward_metrics(drawn), reward_metrics(drawn, trained=kept)
    of_the_reward = {"reward/mean": 0.0, "reward/std": 10.0, "reward/zero_variance_groups": 0.0}
    of_the_reward |= {"reward/min": -10.0, "reward/max": 10.0}
    assert with_model == alone | of_the_reward and alone["reward/accuracy"] == 0.25


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


def test_a_mismatch_is_known_before_the_update_where_all_old_logprobs_are() -> None:
    """Three trained tokens, 0.1, 0.2 and 0.6 nats apart; a prompt's token is not among them."""
    batch = rl_batch("-xx", "x")
    batch.per_token["rollout_logprobs"] = np.array([-9.0, -1.0, -2.0, -3.0], np.float32)
    assert mismatch_before_update(batch) is None
    batch.per_token["old_logprobs"] = np.array([0.0, -1.1, -1.8, -2.4], np.float32)
    distances = mismatch_before_update(batch)
    assert distances is not None and distances.mean() == pytest.approx(0.3)
    assert excess_mismatch(batch, 0.31) is None
    expected = {
        "train/gap_exceeded": 1.0, "logprob_gap/mean": pytest.approx(0.3), "logprob_gap/max": pytest.approx(0.6),
        "logprob_gap/bit_equal": 0.0,
    }  # fmt: skip
    excess = excess_mismatch(batch, 0.29)
    assert excess is not None and excess.metrics() == expected
    assert excess_mismatch(batch, None) is None
    batch.per_token["old_logprobs"][2] = np.nan
    assert mismatch_before_update(batch) is None


@pytest.mark.parametrize(("exceeded", "expected"), [([False, False, False], None), ([False, True], 0.3)])
def test_updates_end_with_the_first_one_beyond_the_limit(exceeded: list[bool], expected: float | None) -> None:
    """The decision is in no metric: these updates have none."""
    updates = PolicyUpdates(rl_batch("xx", "xx", "xx"), recipe(train={"updates_per_step": 3}), step=1)
    num_updates = 0
    for _ in updates:
        updates.add_update(skipped_update(is_mismatch_exceeded=exceeded[num_updates]))
        num_updates += 1
    assert num_updates == len(exceeded) and updates.metrics() == {}
    outcome = StepOutcome()
    updates.add_to(outcome)
    assert outcome == StepOutcome(excess_mismatch=expected)


def test_tokens_of_skipped_updates_and_without_a_loss_are_not_trained() -> None:
    """The second update of the first pass is skipped, and so is the first one of the second pass."""
    settings = recipe(train={"updates_per_step": 2, "epochs_per_step": 2})
    batch = rl_batch("xx", "xxx", "xx", "xx")
    # A token that the teacher lacks, for example.
    batch.loss_mask[3] = False
    _, second, third, _ = batch.samples_by_update(settings, 1)
    assert second.tolist() == [2, 3] and third.tolist() == [0, 3]
    for applied, expected in (
        ([True, False, False], [2, 2, 0, 0]),
        ([False, False, True], [2, 0, 0, 2]),
        ([True, True, False, False], [2, 2, 2, 2]),
        ([False], [0, 0, 0, 0]),
    ):
        updates = PolicyUpdates(batch, settings, step=1)
        for is_applied in applied:
            updates.add_update(Update(UpdateOutcome(is_applied, 1.0, 0.1), {}))
        assert updates.trained_tokens.tolist() == expected


def skipped_update(*, is_mismatch_exceeded: bool) -> Update:
    """An update without metrics, whose log-probs were 0.3 nats from the engine's."""
    return Update(UpdateOutcome(False, 1.0, 0.1, is_mismatch_exceeded=is_mismatch_exceeded, mismatch=Mean(0.3, 4)), {})


def test_an_attempt_without_a_sampled_token_leaves_router_replay_to_the_others() -> None:
    """It failed before its first model call, so no engine chose experts for its prompt."""
    routed, failed = attempt(0, 1.0, 2), attempt(0, 0.0, 0)
    [segment] = routed.segments
    digests = np.array([7, 8, 9, 0], np.uint32)
    segment = replace(segment, routed_experts=ExpertsHandle(1, 5), expert_digests=digests)
    batch = batch_of([replace(routed, segments=(segment,)), failed])
    assert batch.experts is not None and batch.experts.tolist() == [[1, 5], list(NO_EXPERTS)]
    assert batch.expert_digests is not None and batch.expert_digests.tolist() == [*digests, 0, 0]
    assert batch_of([failed, failed]).experts is None and batch_of([attempt(0, 1.0, 2)]).expert_digests is None
    waiting, new = replace(routed, segments=(segment,)), attempt(0, 1.0, 1)
    with pytest.raises(MegarlError, match=r"^trainer.router_replay = True: "):
        batch_of([waiting, new])
    # After a resume with trainer.router_replay=false, only groups that waited since before it have experts.
    without_replay = RLBatch.from_groups([[waiting, new]], replays_routes=False)
    assert without_replay.experts is None and without_replay.expert_digests is None


def test_a_step_with_fewer_samples_than_updates_is_an_error() -> None:
    """Groups of one sample waited since before a resume with more samples per prompt."""
    assert list(map(len, split_evenly(np.arange(5), 2))) == [3, 2]
    with pytest.raises(MegarlError, match="the step has 2 samples for 4 updates"):
        split_evenly(np.arange(2), 4)
