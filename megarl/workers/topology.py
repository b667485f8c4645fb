"""Where processes stand in the network, and which ranks that makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Introduction(NamedTuple):
    """What a process says of itself.

    `turn` counts what the launcher started, node by node; others reach the process at `host`, where it keeps a `port`;
    `switches` are those above its node, from the network's root; `gpus` were given to it alone, if any were.
    """

    turn: int
    node: str
    host: str
    switches: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    port: int = 0


def in_order(processes: Iterable[Introduction]) -> list[Introduction]:
    """The processes by rank: nodes of one switch follow each other, and so do the processes of a node."""
    return sorted(processes, key=lambda process: (process.switches, process.turn))


def places(processes: Sequence[Introduction]) -> list[tuple[str, ...]]:
    """Each rank's node and the switches above it, nearest first; no switches where some are not known."""
    depths = {len(process.switches) for process in processes}
    return [(p.node, *(reversed(p.switches) if len(depths) == 1 else ())) for p in processes]


def environments(processes: Sequence[Introduction]) -> Iterator[dict[str, str]]:
    """What each rank's environment says of its place in the world."""
    on_node, local_rank = Counter(process.node for process in processes), Counter[str]()
    host, port, size = processes[0].host, processes[0].port, len(processes)
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    for rank, process in enumerate(processes):
        node = process.node
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank[node]), "LOCAL_WORLD_SIZE": str(on_node[node])}
        # Every rank sees all GPUs of its node's ranks, whoever gave them out.
        gpus = ",".join(str(gpu) for other in processes if other.node == node for gpu in other.gpus)
        yield world | own | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
        local_rank[node] += 1
