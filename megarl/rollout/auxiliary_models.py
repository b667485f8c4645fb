"""A training step's work on models other than the policy: reference log-probs, critic values and updates, reward-model
scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megarl.cluster.rank_model import RankModel
from megarl.config import Recipe, RewardConfig
from megarl.data.preferences import with_score_masks
from megarl.rollout.rl_batch import RLBatch
from megarl.rollout.step_metrics import merge_updates
from megarl.tracking.metrics import values
from megarl.types import Group, Trajectory

METRICS = {
    "critic/NAME": ("as train/NAME", "the training metric NAME of the critic"),
    "reward/model": ("score", "score of the reward model before clipping and weighting, mean"),
    "reward/model_std": ("score", "standard deviation of the reward model's scores before clipping and weighting"),
}
"""Metrics reported by this module: unit and meaning by metric name. `megarl metrics` lists them."""


async def score_tokens(batch: RLBatch, models: Mapping[str, RankModel], recipe: Recipe, weight_version: int) -> None:
    """Compute the batch's `reference_logprobs` and critic `values` [tokens], if the run has these models.

    With algorithm.old_logprobs = rollout, the engine's log-probs also become the old log-probs of the importance ratio.
    `weight_version` is the version of the trainer's weights before the update.
    """
    if recipe.algorithm.old_logprobs == "rollout":
        batch.start_from_rollout(weight_version)
    if "reference" in models:
        batch.per_token["reference_logprobs"] = await models["reference"].forward(batch)
    if "critic" in models:
        batch.per_token["values"] = await models["critic"].forward(batch)


async def add_model_scores(
    groups: Sequence[Group], batch: RLBatch, reward_model: RankModel, config: RewardConfig
) -> tuple[list[Group], dict[str, float]]:
    """Add a reward model's scores to the rewards of `groups`, and to the batch built from them.

    Returns the groups with new rewards, and the metrics `reward/model` and `reward/model_std` of the raw scores.
    """
    # The last segment of a trajectory ends with its final answer.
    ends = with_score_masks(batch.select(batch.last_segments))
    found = await reward_model.forward(ends)
    # `with_score_places` appended a place to each sequence: the value there covers all of its tokens.
    scores = found[ends.cu_seqlens[1:] - 1].astype(np.float64)
    clipped = scores if config.model_clip is None else scores.clip(-config.model_clip, config.model_clip)
    added = iter((config.model_weight * clipped).tolist())
    rescored = [[_with_score(t, next(added), config.function_weight) for t in group] for group in groups]
    batch.rewards = np.array([t.reward.score if t.reward else 0.0 for group in rescored for t in group])
    batch.model_scores = clipped
    return rescored, {"reward/model": float(scores.mean()), "reward/model_std": float(scores.std())}


def _with_score(trajectory: Trajectory, added: float, function_weight: float) -> Trajectory:
    # A failed attempt stays unscored, so that it is excluded from statistics and training.
    if trajectory.reward is None:
        return trajectory
    score = function_weight * trajectory.reward.score + added
    return replace(trajectory, reward=replace(trajectory.reward, score=score))


async def update_critic(batch: RLBatch, critic: RankModel, recipe: Recipe) -> dict[str, float]:
    """Update the critic on the batch's `returns`, in as many optimizer steps as the recipe demands.

    Returns metrics `critic/loss`, `critic/grad_norm`, `critic/clipped` and others.
    """
    updates = [await critic.update(minibatch) for minibatch in batch.critic_minibatches(recipe)]
    return {name.replace("train/", "critic/", 1): value for name, value in values(merge_updates(updates)).items()}
