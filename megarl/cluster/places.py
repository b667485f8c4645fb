"""Places of a group's processes on the nodes of a run: numbers from 0, those of a node consecutive.

A place modulo the number of places on a node is the process's LOCAL_RANK, the index of its GPU.
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
    taken: Collection[int],
    silent_nodes: Collection[int] = (),
) -> list[int]:
    """Return a place for each rank without a process, in the order of the ranks.

    `held` has the places of the existing processes, by rank. `before` has the places of the replaced group, by rank; if
    the sizes are equal, a rank gets the same place. A group replacing none gets the places from `first` on. Other ranks
    get a free place on the node of the preceding rank, or else the first free place.

    Each node has `per_node` places. Processes of other groups have those in `taken`. Nodes in `silent_nodes`, by
    number, start no processes.
    """
    wanted = before or _adjacent(world_size, first, per_node, taken)
    places = dict(held)
    missing = [rank for rank in range(world_size) if rank not in held]
    for rank in missing:
        used = {*taken, *places.values()}
        if len(wanted) == world_size and wanted[rank] not in used:
            places[rank] = wanted[rank]
            continue
        near = range(0)
        if rank:
            node = places[rank - 1] // per_node
            near = range(node * per_node, (node + 1) * per_node)
        anywhere = (place for place in count() if place // per_node not in silent_nodes)
        places[rank] = next(place for place in chain(near, anywhere) if place not in used)
    return [places[rank] for rank in missing]


def _adjacent(world_size: int, first: int, per_node: int, taken: Collection[int]) -> list[int]:
    """Return the places from `first` on. If some are taken, free places of the first node with room for all ranks.

    Empty if the group needs several nodes.
    """
    own = range(first, first + world_size)
    if not set(taken).intersection(own):
        return list(own)
    if world_size > per_node:
        return []
    for node in count():
        of_node = range(node * per_node, (node + 1) * per_node)
        free = list(islice((place for place in of_node if place not in taken), world_size))
        if len(free) == world_size:
            return free
    raise AssertionError
