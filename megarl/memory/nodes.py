"""Host memory of a run's nodes: how many ranks of each kind a node has, and what they take together."""

from __future__ import annotations

from typing import NamedTuple

from megarl.config import Recipe
from megarl.memory.table import MemoryTable


class NodeRanks(NamedTuple):
    """Ranks of one node: those that train (and sample, if colocated), and those that only sample."""

    trainers: int
    engines: int


class RankHostBytes(NamedTuple):
    """Bytes of host memory of a rank of each kind, at its fullest."""

    trainer: int
    engine: int

    def of_node(self, ranks: NodeRanks) -> int:
        """Bytes of all ranks of a node together."""
        return ranks.trainers * self.trainer + ranks.engines * self.engine


def rank_host_bytes(table: MemoryTable) -> RankHostBytes:
    """The host memory of each kind of rank, by a table; engines that share the trainer's ranks take nothing besides."""
    return RankHostBytes(*(table.host_bytes(*ranks) for ranks in (NodeRanks(1, 0), NodeRanks(0, 1))))


def fullest_node(recipe: Recipe, table: MemoryTable) -> NodeRanks:
    """The ranks of the node whose ranks take the most host memory: `table.host_bytes(*fullest_node(...))` bytes."""
    return max(_ranks_of_nodes(recipe), key=lambda ranks: table.host_bytes(*ranks))


def _ranks_of_nodes(recipe: Recipe) -> set[NodeRanks]:
    """The different mixtures of ranks that nodes have."""
    ranks, engines = recipe.cluster.ranks_per_node, recipe.cluster.groups.engines
    if engines is not None:
        return {NodeRanks(ranks, 0), NodeRanks(0, engines.ranks_per_node)}
    before = range(0, recipe.cluster.world_size, ranks)
    trainers = {min(ranks, max(0, recipe.trainer_ranks - first)) for first in before}
    return {NodeRanks(count, ranks - count) for count in trainers}
