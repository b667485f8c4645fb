"""Checks of the recovery from lost trainer ranks: cluster.recover, cluster.spare_nodes, checkpoint.replicate."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.preflight.registry import checks


@checks("cluster", training_only=True)
def check_recovery(recipe: Recipe) -> Iterator[str]:
    """Yield an error if spare nodes would have no effect."""
    is_replaced = recipe.cluster.recover == "restart" and recipe.cluster.launcher == "slurm"
    if recipe.cluster.spare_nodes and not is_replaced:
        yield (
            f"cluster.spare_nodes = {recipe.cluster.spare_nodes}: spare nodes need cluster.recover=restart and "
            "cluster.launcher=slurm; set both, or set cluster.spare_nodes=0"
        )
    if recipe.cluster.spare_nodes and recipe.cluster.groups.engines is not None:
        yield (
            f"cluster.spare_nodes = {recipe.cluster.spare_nodes}: a job with cluster.groups.engines has no spare "
            "nodes; set cluster.spare_nodes=0"
        )


@checks("checkpoint", training_only=True)
def check_replication(recipe: Recipe) -> Iterator[str]:
    """Yield an error if copies of the state in host memory would lack recorded experts."""
    if recipe.checkpoint.replicate and recipe.trainer.router_replay:
        yield (
            f"checkpoint.replicate = {recipe.checkpoint.replicate}: copies in host memory do not hold the experts "
            "recorded for each token (trainer.router_replay); set checkpoint.replicate=0 and save checkpoints "
            "(checkpoint.every_steps)"
        )
