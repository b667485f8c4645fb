"""Scores of a step's batch by the ranks' models before its update: log-probs, values, the reward model's scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megarl.cluster.batching import RankModel
from megarl.config import Recipe, RewardConfig
from megarl.data.preferences import with_score_places
from megarl.rollout.batch import RLBatch
from megarl.rollout.state import Group
from megarl.types import Trajectory

METRICS = {
    "reward/model": ("score", "bare score of the reward model, mean"),
    "reward/model_std": ("score", "standard deviation of the reward model's bare scores"),
}
"""Names, units and meanings, for `tracking.table`."""


async def score_tokens(batch: RLBatch, models: Mapping[str, RankModel], recipe: Recipe, weight_version: int) -> None:
    """Set the batch's `reference_logprobs` and `values` [tokens], with those models, and where the ratio starts.

    `weight_version` is that of the trainer's weights, before the update.
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
    """Add a reward model's scores to the rewards and scores of groups and of the batch that they make; the groups.

    Metrics: `reward/model`, `reward/model_std`, of its bare scores.
    """
    ends = with_score_places(batch.select(batch.last_segments))
    found = await reward_model.forward(ends)
    scores = found[ends.cu_seqlens[1:] - 1].astype(np.float64)
    clipped = scores if config.model_clip is None else scores.clip(-config.model_clip, config.model_clip)
    added = iter((config.model_weight * clipped).tolist())
    rescored = [[_with_score(t, next(added), config.function_weight) for t in group] for group in groups]
    batch.rewards = np.array([t.reward.score if t.reward else 0.0 for group in rescored for t in group])
    batch.model_scores = clipped
    return rescored, {"reward/model": float(scores.mean()), "reward/model_std": float(scores.std())}


def _with_score(trajectory: Trajectory, added: float, function_weight: float) -> Trajectory:
    if trajectory.reward is None:
        return trajectory
    score = function_weight * trajectory.reward.score + added
    return replace(trajectory, reward=replace(trajectory.reward, score=score))
