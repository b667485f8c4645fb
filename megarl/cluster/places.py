"""Places of a run's processes. A place is the slot of one process, and its GPU, on a node.

Places are numbered from 0 through all nodes, and each node has a block of equal size. All groups on the same nodes
share the numbers. The LOCAL_RANK of a process, the index of its GPU, is its place modulo the places per node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, count, islice


def choose_places(
    world_size: int,
    held: Mapping[int, int],
    *,
    before: Sequence[int],
    first: int,
    per_node: int,
    num_nodes: int,
    taken: Collection[int],
    silent_nodes: Collection[int] = (),
) -> list[int]:
    """Choose a place for each rank without a process. Returns the places in the order of the ranks.

    1. If the group replaces one of the same size, a rank gets the place of the same rank before.
    2. If the group replaces none, its ranks get consecutive places from `first` on. If one of these is taken, they get
       free places of one node.
    3. A rank whose place is not free gets a free place on the node of the preceding rank.
    4. If that node is full, the rank gets the lowest free place of the run.

    Arguments:
        held: Places of the group's existing processes, by rank.
        before: Places of the replaced group, by rank; empty if there is none.
        per_node: Number of places on each node.
        num_nodes: Number of nodes at the run's start. Spare nodes follow them.
        taken: Places of other groups.
        silent_nodes: Numbers of nodes where no process could be started. Rule 4 avoids them.
    """
    preferred = before or _adjacent(world_size, first, per_node, num_nodes, taken)
    places = dict(held)
    missing = [rank for rank in range(world_size) if rank not in held]
    for rank in missing:
        used = {*taken, *places.values()}
        if len(preferred) == world_size and preferred[rank] not in used:
            places[rank] = preferred[rank]
            continue
        near = range(0)
        if rank:
            node = places[rank - 1] // per_node
            near = range(node * per_node, (node + 1) * per_node)
        anywhere = (place for place in count() if place // per_node not in silent_nodes)
        places[rank] = next(place for place in chain(near, anywhere) if place not in used)
    return [places[rank] for rank in missing]


def _adjacent(world_size: int, first: int, per_node: int, num_nodes: int, taken: Collection[int]) -> list[int]:
    """Return the places from `first` on. If some are taken, free places of the first node with room for all ranks.

    Empty if there is none.
    """
    rank_range = range(first, first + world_size)
    if not set(taken).intersection(rank_range):
        return list(rank_range)
    for node in range(num_nodes):
        of_node = range(node * per_node, (node + 1) * per_node)
        free = list(islice((place for place in of_node if place not in taken), world_size))
        if len(free) == world_size:
            return free
    return []
