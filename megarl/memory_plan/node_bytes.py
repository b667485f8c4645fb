"""Host memory of a run's nodes: ranks of each kind on a node, and their total."""

from __future__ import annotations

from typing import NamedTuple

from megarl.config import Recipe
from megarl.memory_plan.memory_table import MemoryTable


class NodeRanks(NamedTuple):
    """Ranks of one node: trainers (also sampling, if colocated) and ranks used only for sampling."""

    trainers: int
    engines: int


class RankHostBytes(NamedTuple):
    """Bytes of host memory of a rank of each kind, at its fullest."""

    trainer: int
    engine: int

    def of_node(self, ranks: NodeRanks) -> int:
        """Return bytes of all ranks of a node together."""
        return ranks.trainers * self.trainer + ranks.engines * self.engine


def rank_host_bytes(table: MemoryTable) -> RankHostBytes:
    """Return the host memory of each kind of rank. Engines on the trainer's ranks are part of the trainer."""
    return RankHostBytes(*(table.host_bytes(*ranks) for ranks in (NodeRanks(1, 0), NodeRanks(0, 1))))


def fullest_node(recipe: Recipe, table: MemoryTable) -> NodeRanks:
    """Return the ranks of the node with the largest host memory, `table.host_bytes(*fullest_node(...))` bytes."""
    return max(_ranks_of_nodes(recipe), key=lambda ranks: table.host_bytes(*ranks))


def _ranks_of_nodes(recipe: Recipe) -> set[NodeRanks]:
    """Return the different combinations of ranks on a node."""
    ranks, engines = recipe.cluster.ranks_per_node, recipe.cluster.groups.engines
    if engines is not None:
        return {NodeRanks(ranks, 0), NodeRanks(0, engines.ranks_per_node)}
    # Ranks are numbered node by node with trainers first, so at most one node has both kinds.
    before = range(0, recipe.cluster.world_size, ranks)
    trainers = {min(ranks, max(0, recipe.trainer_ranks - first)) for first in before}
    return {NodeRanks(count, ranks - count) for count in trainers}
