"""The critic's part of a step."""

from __future__ import annotations

from megarl.cluster.batching import RankModel
from megarl.config import Recipe
from megarl.rollout.batch import RLBatch
from megarl.tracking.metrics import merge, values

METRICS = {
    "critic/NAME": ("as train/NAME", "the metric of training NAME, of the critic"),
}
"""Names, units and meanings, for `tracking.table`."""


async def update_critic(batch: RLBatch, critic: RankModel, recipe: Recipe) -> dict[str, float]:
    """A step's updates of the critic on the batch's `returns`.

    Metrics: `critic/loss`, `/grad_norm`, `/clipped` and so on, as `train/` has them.
    """
    updates = [await critic.update(minibatch) for minibatch in batch.critic_minibatches(recipe)]
    return {name.replace("train/", "critic/", 1): value for name, value in values(merge(updates)).items()}
