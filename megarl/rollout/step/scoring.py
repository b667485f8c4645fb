"""Scores of a step's groups by the run's models, computed before the step's update.

They are log-probs of policy and reference, entropies, the critic's values and the reward model's scores.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from megarl.algorithms.importance import is_of_single_tokens
from megarl.cluster.rank_model import RankModel
from megarl.config import Recipe, RewardConfig
from megarl.data.kinds.preferences import with_score_masks
from megarl.data.token_batch import TokenBatch
from megarl.rollout.state import flatten
from megarl.rollout.step.rl_batch import RLBatch
from megarl.tracking.metric_rows import MetricRow
from megarl.types import Group, Segment, Trajectory

METRICS = (
    MetricRow("reward/model", "score", "score of the reward model before clipping and weighting, mean"),
    MetricRow(
        "reward/model_std", "score", "standard deviation of the reward model's scores before clipping and weighting"
    ),
)

Forward = Callable[[TokenBatch], Awaitable[np.ndarray]]
"""Async function computing the trainer's log-probs of a batch: float32 [tokens], or [2, tokens] with entropies."""


def forward_of(policy: RankModel, recipe: Recipe) -> Forward:
    return policy.forward if recipe.algorithm.entropy_top_share is None else policy.forward_with_entropies


async def score_groups(
    groups: Sequence[Group], models: Mapping[str, RankModel], recipe: Recipe, weight_version: int
) -> tuple[list[Group], RLBatch, dict[str, float]]:
    """Return a step's groups, their batch with the scores of all models, and the metrics (METRICS).

    With a reward model, the rewards of the returned groups include its scores.
    """
    batch = RLBatch.from_groups(
        groups, mask_truncated=recipe.algorithm.mask_truncated, replays_routes=recipe.trainer.router_replay
    )
    await score_tokens(batch, models, recipe, weight_version)
    if "reward_model" not in models:
        return list(groups), batch, {}
    rescored_groups, metrics = await add_model_scores(groups, batch, models["reward_model"], recipe.reward)
    return rescored_groups, batch, metrics


async def score_tokens(batch: RLBatch, models: Mapping[str, RankModel], recipe: Recipe, weight_version: int) -> None:
    """Set the batch's `reference_logprobs` and the critic's `values` [tokens], if the run has these models.

    With algorithm.old_logprobs = rollout, the engine's log-probs also become the old log-probs. `weight_version` is the
    trainer's before the update.
    """
    if recipe.algorithm.old_logprobs == "rollout":
        batch.use_engine_logprobs_as_old(weight_version)
    if "reference" in models:
        batch.per_token["reference_logprobs"] = await models["reference"].forward(batch)
    if "critic" in models:
        batch.per_token["values"] = await models["critic"].forward(batch)


async def add_model_scores(
    groups: Sequence[Group], batch: RLBatch, reward_model: RankModel, config: RewardConfig
) -> tuple[list[Group], dict[str, float]]:
    """Add a reward model's scores to the rewards of `groups`, and of the `batch` built from them.

    Returns the groups and the metrics.
    """
    # A trajectory's last segment ends with its final answer.
    last_segments = with_score_masks(batch.select(batch.last_segments))
    token_scores = await reward_model.forward(last_segments)
    # `with_score_masks` appended a token to each sequence. The model's output there scores the whole sequence.
    scores = token_scores[last_segments.cu_seqlens[1:] - 1].astype(np.float64)
    clipped_scores = scores if config.model_clip is None else scores.clip(-config.model_clip, config.model_clip)
    weighted_scores = iter((config.model_weight * clipped_scores).tolist())
    rescored_groups = [
        [_add_model_score(t, next(weighted_scores), config.function_weight) for t in group] for group in groups
    ]
    batch.rewards = np.array([t.reward.score if t.reward else 0.0 for group in rescored_groups for t in group])
    # Turn rewards are part of `rewards`, so they need the same weight.
    batch.turn_rewards = config.function_weight * batch.turn_rewards
    batch.model_scores = clipped_scores
    return rescored_groups, {"reward/model": float(scores.mean()), "reward/model_std": float(scores.std())}


def _add_model_score(trajectory: Trajectory, weighted_model_score: float, function_weight: float) -> Trajectory:
    # Leave a failed attempt unscored, so that statistics and training exclude it.
    if trajectory.reward is None:
        return trajectory
    score = function_weight * trajectory.reward.score + weighted_model_score
    return replace(trajectory, reward=replace(trajectory.reward, score=score))


async def complete_logprobs(
    groups: Sequence[Group], waiting: Sequence[Group], recipe: Recipe, forward: Forward
) -> tuple[list[Group], list[Group]]:
    """Add the trainer's `old_logprobs` to a step's groups, and to `waiting` groups of a later step, where needed.

    New trajectories of the step's first update need no extra pass: the update's own forward pass computes their
    log-probs. Waiting groups always need a pass. With algorithm.entropy_top_share, all trajectories get `entropies`
    too. `forward` is called at most once. Returns both lists.
    """
    if recipe.algorithm.old_logprobs == "rollout":
        return list(groups), list(waiting)
    trajectories = flatten([*groups, *waiting])
    num_skipped = _count_skippable(recipe, sum(len(group) for group in groups))
    needs_entropies = recipe.algorithm.entropy_top_share is not None
    lacks_values = [
        trajectory_index >= num_skipped and lacks_logprobs(trajectory)
        for trajectory_index, trajectory in enumerate(trajectories)
    ]
    lacks_entropies = [needs_entropies and _lacks_entropies(trajectory) for trajectory in trajectories]
    if indices := [index for index, lacks in enumerate(zip(lacks_values, lacks_entropies, strict=True)) if any(lacks)]:
        # Join all in one batch, because each forward pass is a call to every rank.
        batch = RLBatch.from_groups(
            [[trajectories[index] for index in indices]], replays_routes=recipe.trainer.router_replay
        )
        values_by_row = [
            iter(np.split(values, batch.cu_seqlens[1:-1])) for values in np.atleast_2d(await forward(batch))
        ]
        for index in indices:
            logprobs, *entropies = (list(islice(values, len(trajectories[index].segments))) for values in values_by_row)
            if lacks_values[index]:
                trajectories[index] = with_logprobs(trajectories[index], logprobs)
            if lacks_entropies[index]:
                trajectories[index] = _with_entropies(trajectories[index], *entropies)
    # `trajectories` is flat, so restore the groups in the same order.
    completed_trajectories = iter(trajectories)
    completed_groups, completed_waiting = (
        [[next(completed_trajectories) for _ in group] for group in group_list] for group_list in (groups, waiting)
    )
    return completed_groups, completed_waiting


def _count_skippable(recipe: Recipe, num_trajectories: int) -> int:
    """Return how many of a step's first trajectories need no log-probs before the updates."""
    train = recipe.train
    if _needs_logprobs(recipe) or train.epochs_per_step > 1:
        # A later pass trains the first minibatch again, with changed weights, and needs its old log-probs.
        return 0
    if recipe.logprob_gap_limit is not None and train.updates_per_step > 1:
        # The first update depends on the mismatch of the whole step.
        return 0
    # In its first pass, `RLBatch.minibatches` keeps the order of the samples.
    return num_trajectories // train.updates_per_step


def _needs_logprobs(recipe: Recipe) -> bool:
    """Return whether the recipe needs the trainer's log-probs of all trained tokens before the first update."""
    if recipe.loop == "distillation":
        return recipe.has_advantages
    algorithm = recipe.algorithm
    # Unless the KL is in the loss, it is part of the advantages, computed before the first update.
    is_kl_before = algorithm.kl_coefficient > 0 and algorithm.kl_placement != "loss"
    if is_kl_before or algorithm.selects_by_covariance:
        return True
    return algorithm.importance_sampling is not None and not corrects_in_update(recipe)


def corrects_in_update(recipe: Recipe) -> bool:
    """Return whether updates compute the weights of algorithm.importance_sampling from their own forward pass.

    This saves a pass. It is impossible if weights or log-probs are needed earlier: by distillation, the entropy filter,
    the selection by covariance or metrics of stale groups. It is also impossible for a product over a trajectory's
    segments, because they may be in different micro-batches.
    """
    algorithm = recipe.algorithm
    if recipe.loop != "rl" or (name := algorithm.importance_sampling) is None or algorithm.old_logprobs != "trainer":
        return False
    if algorithm.entropy_top_share is not None or algorithm.selects_by_covariance or recipe.rollout.carries_groups:
        return False
    has_segments = any(source.recipe.rollout.turns_of_attempt > 1 for source in recipe.sources)
    return is_of_single_tokens(name) or not has_segments


def lacks_logprobs(trajectory: Trajectory) -> bool:
    return any(segment.old_logprobs is None for segment in trajectory.segments)


def _lacks_entropies(trajectory: Trajectory) -> bool:
    return any(segment.entropies is None for segment in trajectory.segments)


def with_logprobs(trajectory: Trajectory, logprobs: Sequence[np.ndarray]) -> Trajectory:
    """Return the trajectory with `logprobs` as `old_logprobs`: one array [tokens] per segment, zero if not sampled."""
    pairs = zip(trajectory.segments, logprobs, strict=True)
    return replace(
        trajectory, segments=tuple(replace(s, old_logprobs=_zero_unsampled(s, values)) for s, values in pairs)
    )


def _with_entropies(trajectory: Trajectory, entropies: Sequence[np.ndarray]) -> Trajectory:
    pairs = zip(trajectory.segments, entropies, strict=True)
    return replace(trajectory, segments=tuple(replace(s, entropies=_zero_unsampled(s, values)) for s, values in pairs))


def _zero_unsampled(segment: Segment, values: np.ndarray) -> np.ndarray:
    return np.where(segment.loss_mask, values, np.float32(0))
