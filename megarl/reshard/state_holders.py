"""Which ranks hold copies of which rank's training state.

After a step, each rank holds a copy of its own training state. It also holds copies of the ranks whose partner it is
(`partners`). When the parallel sizes change, each leaving rank sends the copies that no staying rank holds to staying
ranks (`hand_overs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megarl.reshard.plan import RankTopology


def partners(topology: RankTopology) -> list[int]:
    """Return, for each rank, the rank that receives its copies: on the next node, or on one node the next rank.

    `topology` has each rank's node first. No two ranks have the same partner if all nodes have equally many ranks.
    """
    nodes = list(dict.fromkeys(place[0] for place in topology))
    on_node = {node: [rank for rank, place in enumerate(topology) if place[0] == node] for node in nodes}
    if len(nodes) == 1:
        return [(rank + 1) % len(topology) for rank in range(len(topology))]
    partner_ranks = [0] * len(topology)
    for number, node in enumerate(nodes):
        next_ranks = on_node[nodes[(number + 1) % len(nodes)]]
        for place, rank in enumerate(on_node[node]):
            partner_ranks[rank] = next_ranks[place % len(next_ranks)]
    return partner_ranks


def hand_overs(held_ranks: Sequence[Iterable[int]], stays: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the copies that only leaving ranks hold: (rank that had the state, sender, receiver).

    `held_ranks` lists, for each rank, the ranks whose copies it holds. `stays` are the ranks that stay.
    """
    holders: dict[int, list[int]] = {}
    for rank, origins in enumerate(held_ranks):
        for origin in origins:
            holders.setdefault(origin, []).append(rank)
    alone = [origin for origin, ranks in sorted(holders.items()) if not set(ranks) & set(stays)]
    return [(origin, holders[origin][0], stays[number % len(stays)]) for number, origin in enumerate(alone)]
