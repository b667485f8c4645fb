"""The role of a trained model: its objective, optimizer settings, and the limits of its updates."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import OptimizerConfig, Recipe
from megarl.training.distillation.objective import divergence_objective
from megarl.training.objective import (
    Objective,
    critic_objective,
    policy_objective,
    preference_objective,
    reward_objective,
    supervised_loss,
)


@dataclass(frozen=True, slots=True)
class Role:
    """Purpose of a trained model: its loss and optimizer. `num_updates`: updates of the whole run."""

    objective: Objective
    optimizer: OptimizerConfig
    num_updates: int
    skip_ratio: float | None = None
    """Maximum mean probability ratio of an update's tokens; above it the update is skipped."""
    max_logprob_gap: float | None = None
    """Maximum mean difference, in nats, of trainer and engine log-probs; above it the update is skipped."""
    field: str = "optimizer"
    """Recipe section with the optimizer's settings, for messages."""


def role_of_policy(recipe: Recipe) -> Role:
    """Return the role of the policy, or of the model trained by SFT, preference or reward-model training."""
    steps, algorithm = recipe.train.steps, recipe.algorithm
    if recipe.is_on_policy:
        num_updates = (steps - recipe.frozen_steps) * recipe.train.num_updates
        mismatch_limit = recipe.logprob_gap_limit
        objective = policy_objective(algorithm) if recipe.has_advantages else divergence_objective
        return Role(objective, recipe.optimizer, num_updates, algorithm.skip_ratio, mismatch_limit)
    objective = {
        "sft": lambda: supervised_loss,
        "preference": lambda: preference_objective(recipe.preference),
        "reward_model": lambda: reward_objective(recipe.preference),
    }[recipe.loop]()
    return Role(objective, recipe.optimizer, steps)


def role_of_critic(recipe: Recipe) -> Role:
    critic = recipe.critic
    updates = recipe.train.steps * critic.updates_per_step
    return Role(critic_objective(critic), critic.optimizer, updates, field="critic.optimizer")
