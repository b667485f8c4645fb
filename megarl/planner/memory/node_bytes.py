"""Host memory of a run's nodes: the ranks of each kind on a node, and their total."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import Recipe
from megarl.planner.memory.devices import LIBRARY_BYTES
from megarl.planner.memory.memory_table import MemoryTable

DRIVER_BYTES = LIBRARY_BYTES + 10**9
"""Host memory of the driver, which any node may have: its libraries, and a step's samples. Source of the second:
tests/rollout/test_driver_bytes.py, at most a gigabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """Number of ranks on one node: trainers (colocated ones also sample), and ranks used only for sampling."""

    trainers: int = 0
    engines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHostBytes:
    """Maximum bytes of host memory of one rank, for each kind of rank."""

    trainer: int
    engine: int

    def of_node(self, ranks: NodeRanks) -> int:
        """Return the bytes of all ranks on a node together."""
        return ranks.trainers * self.trainer + ranks.engines * self.engine


def rank_host_bytes(table: MemoryTable) -> RankHostBytes:
    """Return the host memory of each kind of rank. An engine on a trainer's rank counts as part of the trainer."""
    return RankHostBytes(trainer=table.host_bytes(num_trainers=1), engine=table.host_bytes(num_engines=1))


def fullest_node(recipe: Recipe, table: MemoryTable) -> NodeRanks:
    """Return the ranks of the node with most host memory."""
    return max(_ranks_of_nodes(recipe), key=rank_host_bytes(table).of_node)


def fullest_node_bytes(recipe: Recipe, table: MemoryTable) -> int:
    """Return the host memory in bytes of the ranks of the node with most."""
    return rank_host_bytes(table).of_node(fullest_node(recipe, table))


def node_terms(recipe: Recipe, table: MemoryTable) -> dict[str, int]:
    """Return the host memory of the fullest node in bytes, by its parts in words: ranks of each kind, driver."""
    ranks = fullest_node(recipe, table)
    # Without separate engines there is one kind of rank, and it trains.
    parts = {
        f"{count} ranks in {phase.name}": count * phase.host_bytes
        for count, phase in zip((ranks.trainers, ranks.engines), table.fullest_host, strict=False)
        if count
    }
    return parts | {"driver": DRIVER_BYTES}


def _ranks_of_nodes(recipe: Recipe) -> set[NodeRanks]:
    """Return the different numbers of trainer and engine ranks that nodes of the run have."""
    ranks, engines = recipe.cluster.ranks_per_node, recipe.cluster.groups.engines
    if engines is not None:
        return {NodeRanks(trainers=ranks), NodeRanks(engines=engines.ranks_per_node)}
    # Ranks are numbered node by node with trainers first, so at most one node has both kinds.
    before = range(0, recipe.cluster.world_size, ranks)
    trainers = {min(ranks, max(0, recipe.trainer_ranks - first)) for first in before}
    return {NodeRanks(trainers=count, engines=ranks - count) for count in trainers}
