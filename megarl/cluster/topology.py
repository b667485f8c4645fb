"""Places of a run's processes in the network, and the ranks derived from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple


class NodeKind(NamedTuple):
    """The nodes of one kind: all nodes of the run, or only those of the trainers or of the engines."""

    first_rank: int
    """First rank on nodes of this kind. The other ranks follow, node by node."""
    nodes: int
    ranks_per_node: int
    component: int | None = None
    """Index of these nodes' component in a heterogeneous Slurm job; None: the job has one component."""
    ray_resources: Mapping[str, float] = {}
    """Ray resources that nodes of this kind have, in addition to GPUs or CPUs."""


class Introduction(NamedTuple):
    """First message that a rank process sends to the driver.

    `turn` is its index among the launcher's processes, node by node. `host` is its address for other ranks. `switches`
    are the network switches above its node, from the root. `gpus` are its GPUs, if the launcher assigned any. `pid` is
    its process id on its node; 0: not known.
    """

    turn: int
    node: str
    host: str
    switches: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    pid: int = 0

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Introduction:
        """Read the first message of a process from JSON values. Raises TypeError or ValueError if it is not valid."""
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        process = cls(**plain)
        kinds = (process.turn, int), (process.node, str), (process.host, str), (process.pid, int)
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise TypeError(f"the first message of a rank process is not valid: {fields}")
        return process


def in_order(processes: Iterable[Introduction]) -> list[Introduction]:
    """Return the processes sorted by rank. Ranks of a node are consecutive, and so are nodes under one switch."""
    return sorted(processes, key=lambda process: (process.switches, process.turn))


def rank_topology(processes: Sequence[Introduction]) -> list[tuple[str, ...]]:
    """Return, for each rank, its node and the network switches above it, nearest first.

    Without any switches if their number differs between ranks.
    """
    depths = {len(process.switches) for process in processes}
    return [(p.node, *(reversed(p.switches) if len(depths) == 1 else ())) for p in processes]


def environments(processes: Sequence[Introduction], local_ranks: Sequence[int]) -> Iterator[dict[str, str]]:
    """Yield the environment variables of each rank: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GPUs.

    `local_ranks` holds each rank's number on its node.
    """
    on_node = Counter(process.node for process in processes)
    by_local_rank = [process for _, process in sorted(zip(local_ranks, processes, strict=True), key=itemgetter(0))]
    world = {"WORLD_SIZE": str(len(processes))}
    for rank, (process, local_rank) in enumerate(zip(processes, local_ranks, strict=True)):
        node = process.node
        variables = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(on_node[node])}
        # Every rank sees all GPUs of its node's ranks, also where Slurm or Ray gave each rank only its own. A rank's
        # own GPU is the one at its local rank.
        gpus = ",".join(str(gpu) for rank_place in by_local_rank if rank_place.node == node for gpu in rank_place.gpus)
        yield world | variables | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
