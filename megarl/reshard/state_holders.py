"""Nodes that hold copies of the ranks' training states, and ranks that read them.

After a step, each node holds copies of the training states of its own ranks, and of the ranks whose partner is one of
them (`partners`). After a restart a rank reads all copies of its node. Copies that only leaving nodes hold are first
sent to a node of the new start (`hand_overs`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

from megarl.reshard.plan import RankTopology

Node = TypeVar("Node", bound=Hashable)


def partners(topology: RankTopology) -> list[int]:
    """Return, for each rank, the rank of the next node that receives its copy. With one node it is the rank itself.

    `topology` has each rank's node first. No two ranks have the same partner if all nodes have equally many ranks.
    """
    nodes = list(dict.fromkeys(place[0] for place in topology))
    if len(nodes) == 1:
        # A second copy on the same node would be lost with the first one.
        return list(range(len(topology)))
    on_node = {node: [rank for rank, place in enumerate(topology) if place[0] == node] for node in nodes}
    partner_of = [0] * len(topology)
    for number, node in enumerate(nodes):
        next_ranks = on_node[nodes[(number + 1) % len(nodes)]]
        for place, rank in enumerate(on_node[node]):
            partner_of[rank] = next_ranks[place % len(next_ranks)]
    return partner_of


def hand_overs(holders: Mapping[int, Collection[Node]], nodes: Sequence[Node]) -> dict[int, Node]:
    """Return the node that receives each copy held by none of `nodes`. A copy is named by the rank of its state.

    `holders` has the nodes with each copy, `nodes` those of the new start.
    """
    missing = [origin for origin, holding in sorted(holders.items()) if not set(holding) & set(nodes)]
    return {origin: nodes[number % len(nodes)] for number, origin in enumerate(missing)}
