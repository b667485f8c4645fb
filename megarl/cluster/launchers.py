"""Start of the rank processes by the recipe's launcher: on this machine, with srun, or with Ray."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.cluster.local import LocalGroup, import_early
from megarl.cluster.run_ranks import RunRanks
from megarl.cluster.srun import SrunGroup
from megarl.cluster.topology import NodeKind
from megarl.cluster.worker_group import PartOfRun, WorkerGroup
from megarl.config import ClusterConfig
from megarl.config.parallel import ParallelConfig
from megarl.platform import chosen_device, device
from megarl.platform.memory.shared_memory import check_shared_memory
from megarl.processes.fork_server import end_fork_servers
from megarl.processes.server_process import MakeServer, ServerProcess


@contextmanager
def importing_early(cluster: ClusterConfig) -> Iterator[None]:
    """Context in which the ranks' libraries are imported in the background, if this machine runs ranks on its CPU.

    On other machines it does nothing. `start_ranks`, called in the context and in the same thread, uses the importing
    process and waits only for the rest of the imports. If the block raises, this process is ended.
    """
    # With a GPU each rank imports by itself, because CUDA cannot be used after a fork.
    if cluster.launcher == "local" and not chosen_device.has_cuda_build():
        import_early(_environment(cluster, cluster.ranks_per_node), _imports())
    try:
        yield
    except BaseException:
        end_fork_servers(is_all=False)
        raise


def _environment(cluster: ClusterConfig, ranks_per_node: int, *, orders_kernels: bool = False) -> dict[str, str]:
    return device.rank_environment(ranks_per_node, cluster.device, cluster.bind_to_numa, orders_kernels=orders_kernels)


def _imports() -> tuple[str, ...]:
    """Return the modules imported once for all ranks of this machine."""
    return device.forkable_imports("megarl.worker.colocated")


async def start_ranks(
    cluster: ClusterConfig,
    log_folder: Path,
    replica_sizes: Sequence[int] = (),
    *,
    avoided_nodes: Sequence[str] = (),
    trainer: ParallelConfig | None = None,
) -> RunRanks:
    """Start the ranks of a cluster. Their first worker class is `NodeReport`, which checks the nodes.

    `replica_sizes` are the numbers of ranks of separate engine replicas. Each replica is a group of its own; the
    trainers have the other ranks, with the parallel sizes `trainer`; None: nothing is trained. Ray places no rank on
    `avoided_nodes`; the other launchers have no choice of nodes.
    If this machine runs the ranks, it must have the device (`cluster.device`) and writable shared memory. Otherwise
    raises ConfigError or DiskFullError.
    """
    if cluster.launcher == "local":
        device.require(cluster.device)
        check_shared_memory()
    key = secrets.token_bytes(32)
    starts = [cluster.world_size - sum(replica_sizes[index:]) for index in range(len(replica_sizes))]
    engines = list(zip(replica_sizes, starts, strict=True))
    trainers = [(cluster.world_size - sum(replica_sizes), 0)]
    # Engines with nodes of their own kind are placed before the trainers: Ray gives trainers any node, also these.
    turns = (trainers, engines) if cluster.groups.engines is None else (engines, trainers)
    started: list[WorkerGroup] = []
    try:
        for turn in turns:
            starts = [
                start_group(
                    cluster,
                    log_folder,
                    size,
                    PartOfRun(first_rank, cluster.world_size, key),
                    _kind_of(cluster, first_rank),
                    avoided_nodes,
                    orders_kernels=first_rank == 0 and trainer is not None and _splits_layers(trainer),
                )
                for size, first_rank in turn
            ]
            started += await _started_together(starts)
    except BaseException:
        await asyncio.gather(*(group.close() for group in started))
        raise
    first, *others = sorted(started, key=lambda group: group.part.first_rank)
    return RunRanks(first, others)


async def _started_together(starts: Sequence[Coroutine[Any, Any, WorkerGroup]]) -> list[WorkerGroup]:
    """Start several groups of ranks concurrently. If one fails, close all others and raise its error."""
    starting = [asyncio.ensure_future(start) for start in starts]
    try:
        return await asyncio.gather(*starting)
    except BaseException:
        for start in starting:
            start.cancel()
        outcomes = await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(group.close() for group in outcomes if isinstance(group, WorkerGroup)))
        raise


async def start_group(
    cluster: ClusterConfig,
    log_folder: Path,
    size: int,
    part: PartOfRun,
    kind: NodeKind,
    avoided_nodes: Sequence[str] = (),
    *,
    others: Callable[[], Sequence[WorkerGroup]] = lambda: (),
    places: Sequence[int] = (),
    orders_kernels: bool = False,
) -> WorkerGroup:
    """Start `size` ranks of a cluster as one group.

    Arguments:
        part: Position of the group's ranks among those of the run.
        kind: Nodes for the group: all of the run, or only those of the trainers or of the engines.
        avoided_nodes: Nodes on which Ray places no rank. Other launchers ignore it.
        others: Function returning the run's other groups. It returns some only if the group starts after them.
        places: Places of a lost group replaced by this one. Empty: places not used by the other groups.
        orders_kernels: Start a GPU's kernels in the order of their launches, over all streams.
    """
    group = _group(cluster, size, part, kind, avoided_nodes)
    group.kind, group.others, group.former_places = kind, others, places
    # Trainers have the first ranks. A lost engine replica is started again as a whole.
    group.keeps_survivors = cluster.recover != "stop" and part.first_rank == 0
    return await group.start(
        "megarl.cluster.node_checks:NodeReport",
        {},
        log_folder=log_folder,
        start_timeout_seconds=cluster.start_timeout_seconds,
        environment={
            **_environment(cluster, kind.ranks_per_node, orders_kernels=orders_kernels),
            # A group starting after the others gets a name of its own, because numbers of ranks change.
            **_flight_recorder(
                cluster, log_folder, f"{part.first_rank}_{secrets.token_hex(2)}" if others() else str(part.first_rank)
            ),
        },
    )


def _flight_recorder(cluster: ClusterConfig, log_folder: Path, group: str) -> dict[str, str]:
    """Return the variables with which NCCL's flight recorder writes a file when a collective times out.

    Rank N of the group named `group` writes `flight_GROUP_N` to the log folder. Variables of the user come first. Empty
    for ranks on the CPU, which have no NCCL.
    """
    if cluster.device == "cpu" or not chosen_device.has_cuda_build():
        return {}
    variables = {
        # Number of newest collectives in the file: several steps of a large model.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{log_folder.absolute()}/flight_{group}_",
    }
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def _splits_layers(trainer: ParallelConfig) -> bool:
    """Return whether Megatron splits layers over ranks, and overlaps transfers inside a layer with its products.

    Megatron-Core 0.16 launches such a transfer first and relies on kernels starting in this order.
    """
    # For other trainers, and for engines alone, one queue of kernels would only make independent streams wait.
    return max(trainer.tp, trainer.cp, trainer.etp) > 1


def _kind_of(cluster: ClusterConfig, rank: int) -> NodeKind:
    """Return the kind of nodes (trainers' or engines') that the rank belongs to."""
    trainer_kind, engines = NodeKind(0, cluster.nodes, cluster.ranks_per_node), cluster.groups.engines
    if engines is None:
        return trainer_kind
    num_ranks = cluster.nodes * cluster.ranks_per_node
    if rank < num_ranks:
        # With two kinds, a Slurm job is heterogeneous: component 0 has the trainers' nodes, component 1 the engines'.
        return trainer_kind._replace(component=0)
    return NodeKind(num_ranks, engines.nodes, engines.ranks_per_node, component=1, ray_resources=engines.ray_resources)


def _group(
    cluster: ClusterConfig, size: int, part: PartOfRun, kind: NodeKind, avoided_nodes: Sequence[str]
) -> WorkerGroup:
    """Return a group object for the recipe's launcher, without starting its processes."""
    if cluster.launcher == "slurm":
        return SrunGroup(size, cluster.srun_options, part, kind)
    if cluster.launcher == "ray":
        # Imported here, because Ray is optional.
        from megarl.cluster.ray import RayGroup

        return RayGroup(size, cluster.ray_address, kind, part, avoided_nodes=avoided_nodes)
    return LocalGroup(size, part, imports=_imports())


def server_processes(cluster: ClusterConfig) -> MakeServer:
    """Return a function creating reward and environment processes: on this machine, or on the run's Ray cluster."""
    if cluster.launcher != "ray":
        return ServerProcess
    # Imported here, because Ray is optional.
    from megarl.processes.on_ray import round_robin_over_nodes

    return round_robin_over_nodes()
