"""Host memory of a node: the sum over its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import Recipe
from megarl.planner.memory.devices import LIBRARY_BYTES
from megarl.planner.memory.memory_table import MemoryTable

DRIVER_BYTES = LIBRARY_BYTES + 10**9
"""Host memory of the driver, on any node: its libraries, and a step's samples, at most a gigabyte
(tests/rollout/step/test_driver_bytes.py).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """Ranks of one node: trainers (a colocated one also samples), and ranks that only sample."""

    trainers: int = 0
    engines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHostBytes:
    """Maximum bytes of host memory of a rank, for each kind of rank."""

    trainer: int
    engine: int

    def of_node(self, ranks: NodeRanks) -> int:
        return ranks.trainers * self.trainer + ranks.engines * self.engine


def rank_host_bytes(table: MemoryTable) -> RankHostBytes:
    """Return the host memory per rank. A colocated engine counts as part of the trainer."""
    return RankHostBytes(trainer=table.host_bytes(num_trainers=1), engine=table.host_bytes(num_engines=1))


def fullest_node(recipe: Recipe, table: MemoryTable) -> NodeRanks:
    return max(_ranks_of_nodes(recipe), key=rank_host_bytes(table).of_node)


def fullest_node_bytes(recipe: Recipe, table: MemoryTable) -> int:
    return rank_host_bytes(table).of_node(fullest_node(recipe, table))


def node_terms(recipe: Recipe, table: MemoryTable) -> dict[str, int]:
    """Return the bytes of host memory of the fullest node, by part in words: each kind of rank, and the driver."""
    ranks = fullest_node(recipe, table)
    # Without separate engines, every rank trains.
    bytes_by_part = {
        f"{count} ranks in {phase.name}": count * phase.host_bytes
        for count, phase in zip((ranks.trainers, ranks.engines), table.fullest_host, strict=False)
        if count
    }
    return bytes_by_part | {"driver": DRIVER_BYTES}


def _ranks_of_nodes(recipe: Recipe) -> set[NodeRanks]:
    """Return the distinct pairs (trainer ranks, engine ranks) of a run's nodes."""
    ranks_per_node, engines = recipe.cluster.ranks_per_node, recipe.cluster.groups.engines
    if engines is not None:
        return {NodeRanks(trainers=ranks_per_node), NodeRanks(engines=engines.ranks_per_node)}
    # Ranks are numbered node by node, trainers first, so at most one node has both kinds.
    first_ranks = range(0, recipe.cluster.world_size, ranks_per_node)
    trainer_counts = {min(ranks_per_node, max(0, recipe.trainer_ranks - first_rank)) for first_rank in first_ranks}
    return {NodeRanks(trainers=count, engines=ranks_per_node - count) for count in trainer_counts}
