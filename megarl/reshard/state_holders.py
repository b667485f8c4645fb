"""Nodes with copies of the ranks' training states, and the ranks that read the copies.

After a step, a node holds the states of its own ranks and of ranks with a partner there (`partners`). After a restart a
rank reads all copies of its node. Copies on leaving nodes only are first sent to a node of the new start
(`hand_overs`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

from megarl.reshard.plan import RankTopology

Node = TypeVar("Node", bound=Hashable)


def partners(topology: RankTopology) -> list[int]:
    """Return each rank's partner on the next node, which receives its copy. With one node it is the rank itself.

    `topology` lists each rank's node first. No two ranks share a partner if all nodes have equally many ranks.
    """
    nodes = list(dict.fromkeys(position[0] for position in topology))
    if len(nodes) == 1:
        # A second copy on the same node would be lost together with the first.
        return list(range(len(topology)))
    ranks_on_node = {node: [rank for rank, position in enumerate(topology) if position[0] == node] for node in nodes}
    partner_of = [0] * len(topology)
    for node_index, node in enumerate(nodes):
        next_ranks = ranks_on_node[nodes[(node_index + 1) % len(nodes)]]
        for position, rank in enumerate(ranks_on_node[node]):
            partner_of[rank] = next_ranks[position % len(next_ranks)]
    return partner_of


def hand_overs(holders: Mapping[int, Collection[Node]], nodes: Sequence[Node]) -> dict[int, Node]:
    """Return the receiving node of each copy that none of `nodes` holds. A copy is named by the rank of its state.

    `holders` has the nodes with each copy; `nodes` are the nodes of the new start.
    """
    missing_origins = [
        origin for origin, holding_nodes in sorted(holders.items()) if not set(holding_nodes) & set(nodes)
    ]
    return {origin: nodes[copy_index % len(nodes)] for copy_index, origin in enumerate(missing_origins)}
