"""The critic's part of a step."""

from __future__ import annotations

from megarl.cluster.batching import RankModel
from megarl.config import Recipe
from megarl.rollout.rl_batch import RLBatch
from megarl.rollout.step_metrics import merge_updates
from megarl.tracking.metrics import values

METRICS = {
    "critic/NAME": ("as train/NAME", "the training metric NAME of the critic"),
}
"""Names, units and meanings, for `tracking.table`."""


async def update_critic(batch: RLBatch, critic: RankModel, recipe: Recipe) -> dict[str, float]:
    """Update the critic on the batch's `returns`, as often as the recipe says.

    Metrics: `critic/loss`, `critic/grad_norm`, `critic/clipped` and others, named as in `train/`.
    """
    updates = [await critic.update(minibatch) for minibatch in batch.critic_minibatches(recipe)]
    return {name.replace("train/", "critic/", 1): value for name, value in values(merge_updates(updates)).items()}
