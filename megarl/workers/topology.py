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
    first = processes[0]
    for rank, process in enumerate(processes):
        # Every rank sees all GPUs of its node's ranks, whoever gave them out.
        gpus = [str(gpu) for other in processes if other.node == process.node for gpu in other.gpus]
        yield {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(processes)),
            "LOCAL_RANK": str(local_rank[process.node]),
            "LOCAL_WORLD_SIZE": str(on_node[process.node]),
            "MASTER_ADDR": first.host,
            "MASTER_PORT": str(first.port),
        } | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        local_rank[process.node] += 1
