"""Where processes stand in the network, and which ranks that makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Introduction(NamedTuple):
    """What a process says of itself.

    `turn` counts what the launcher started, node by node; others reach the process at `host`; `switches` are those
    above its node, from the network's root; `gpus` were given to it alone, if any were.
    """

    turn: int
    node: str
    host: str
    switches: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Introduction:
        """The introduction that was sent as JSON. Raises TypeError or ValueError if it is none."""
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        process = cls(**plain)
        kinds = (process.turn, int), (process.node, str), (process.host, str)
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise TypeError(f"{fields} is no introduction")
        return process


def in_order(processes: Iterable[Introduction]) -> list[Introduction]:
    """The processes by rank: nodes of one switch follow each other, and so do the processes of a node."""
    return sorted(processes, key=lambda process: (process.switches, process.turn))


def rank_topology(processes: Sequence[Introduction]) -> list[tuple[str, ...]]:
    """Each rank's node and the switches above it, nearest first; no switches where some are not known."""
    depths = {len(process.switches) for process in processes}
    return [(p.node, *(reversed(p.switches) if len(depths) == 1 else ())) for p in processes]


def environments(processes: Sequence[Introduction]) -> Iterator[dict[str, str]]:
    """What each rank's environment says of its place in the world."""
    on_node, local_rank = Counter(process.node for process in processes), Counter[str]()
    world = {"WORLD_SIZE": str(len(processes))}
    for rank, process in enumerate(processes):
        node = process.node
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank[node]), "LOCAL_WORLD_SIZE": str(on_node[node])}
        # Every rank sees all GPUs of its node's ranks, whoever gave them out.
        gpus = ",".join(str(gpu) for other in processes if other.node == node for gpu in other.gpus)
        yield world | own | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
        local_rank[node] += 1
