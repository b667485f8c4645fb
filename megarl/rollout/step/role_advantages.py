"""Advantages of self-play."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.advantages import rae
from megarl.config import Recipe
from megarl.rollout.step.rl_batch import RLBatch
from megarl.types import ConfigError


def role_advantages(scores: Tensor, batch: RLBatch, recipe: Recipe, baselines: dict[str, float]) -> Tensor:
    """Return advantages by role-conditioned baselines (rae), [samples], like `scores`; zero for unscored samples.

    `baselines` maps a role (in a mixture SOURCE.ROLE) to its baseline, a mean of earlier rewards, and is updated. A new
    role starts at 0. Samples count in the order of their numbers. Raises ConfigError for a sample without a role.
    """
    # `rae` updates a baseline after each sample, so the order matters.
    scored_samples = sorted(np.flatnonzero(batch.is_scored).tolist(), key=lambda sample: batch.sample_ids[sample])
    name_by_scored_sample = [_make_baseline_key(recipe, batch, sample) for sample in scored_samples]
    baseline_names = list(dict.fromkeys(name_by_scored_sample))
    roles = torch.tensor([baseline_names.index(name) for name in name_by_scored_sample], dtype=torch.int64)
    baselines_before = torch.tensor([baselines.get(name, 0.0) for name in baseline_names], dtype=scores.dtype)
    scored_advantages, baselines_after = rae(
        scores[scored_samples], roles, baselines_before, role_decay=recipe.algorithm.role_decay
    )
    baselines.update(zip(baseline_names, baselines_after.tolist(), strict=True))
    advantages = torch.zeros_like(scores)
    advantages[scored_samples] = scored_advantages
    return advantages


def _make_baseline_key(recipe: Recipe, batch: RLBatch, sample: int) -> str:
    """Return the key of a sample's baseline: its role, in a mixture SOURCE.ROLE."""
    role = batch.roles[sample]
    if role is None:
        raise ConfigError(
            f"algorithm.advantage = rae: environment {batch.environments[sample]} named no role; return it as role in "
            "each Start, or set algorithm.advantage=grpo"
        )
    # Without a mixture the source is named after the environment's path, and a run's folder can be moved.
    return f"{batch.environments[sample]}.{role}" if recipe.mixture else role
