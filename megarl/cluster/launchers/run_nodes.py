"""Nodes of a run from the recipe's launcher, and the start of ranks on them."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.agents.agent_link import AgentLink, RankPlace
from megarl.cluster.agents.nodes import Nodes
from megarl.cluster.agents.topology import NodeKind
from megarl.cluster.calls.group_ranks import PartOfRun
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.launchers.local import LocalAgent, LocalNodes
from megarl.cluster.launchers.srun import SrunNodes
from megarl.cluster.run_ranks import RunRanks
from megarl.config import ClusterConfig
from megarl.config.parallel import ParallelConfig
from megarl.platform import chosen_device, device, numa
from megarl.platform.memory.shared_memory import check_shared_memory
from megarl.processes.server_process import MakeServer, ServerProcess
from megarl.rounding import divide_up
from megarl.types import MegarlError


@contextmanager
def importing_early(cluster: ClusterConfig) -> Iterator[None]:
    """Context in which this machine's ranks import their libraries in the background, if they run on its CPU.

    `start_ranks`, called in the context, uses the importing agent. The context ends an unused one.
    """
    # With a GPU each rank imports by itself, because CUDA cannot be used after a fork.
    if cluster.launcher == "local" and not chosen_device.has_cuda_build():
        _early.agent = LocalAgent(_make_environment(cluster, cluster.ranks_per_node), _list_forkable_imports())
    try:
        yield
    finally:
        if (agent := _early.take()) is not None:
            agent.abandon()


@dataclass(slots=True)
class _EarlyAgent:
    """Agent of this machine that imports before a run starts; None: a run has taken it, or there is none."""

    agent: LocalAgent | None = None

    def take(self) -> LocalAgent | None:
        agent, self.agent = self.agent, None
        return agent


_early = _EarlyAgent()


def _make_environment(cluster: ClusterConfig, ranks_per_node: int, *, orders_kernels: bool = False) -> dict[str, str]:
    """Return the variables of ranks. On Ray, cores follow the GPUs: other agents may use the rest."""
    variables = device.rank_environment(
        ranks_per_node, cluster.device, cluster.bind_to_numa, orders_kernels=orders_kernels
    )
    if cluster.launcher == "ray" and numa.VARIABLE in variables:
        variables[numa.VARIABLE] = numa.BY_GPU
    return variables


def _list_forkable_imports() -> tuple[str, ...]:
    return device.forkable_imports("megarl.worker.colocated")


class RunNodes:
    """All nodes of a run, and the start of ranks on them.

    Engines may have nodes of another kind than the trainers (`cluster.groups.engines`).
    """

    def __init__(self, cluster: ClusterConfig, avoided_nodes: Sequence[str] = ()) -> None:
        """Create the nodes without agents. Ray avoids `avoided_nodes`; other launchers cannot choose."""
        self._cluster = cluster
        num_ranks, engines = cluster.nodes * cluster.ranks_per_node, cluster.groups.engines
        # With engines on nodes of another kind, a Slurm job is heterogeneous. Component 0 has the trainers' nodes,
        # component 1 the engines'.
        kind = NodeKind(0, cluster.nodes, cluster.ranks_per_node, component=None if engines is None else 0)
        self.trainer_nodes = _make_nodes(cluster, kind, avoided_nodes)
        self.engine_nodes = self.trainer_nodes
        if engines is not None:
            kind = NodeKind(
                num_ranks, engines.nodes, engines.ranks_per_node, component=1, ray_resources=engines.ray_resources
            )
            self.engine_nodes = _make_nodes(cluster, kind, avoided_nodes)
        self._key = secrets.token_bytes(32)

    @property
    def all_nodes(self) -> list[Nodes]:
        return list(dict.fromkeys((self.trainer_nodes, self.engine_nodes)))

    async def start(self, log_folder: Path) -> None:
        """Start all agents. Raises ConfigError or PeerLostError, and leaves no agent then."""
        try:
            # Engines with nodes of their own kind come first: Ray gives trainers any node, also these.
            for nodes in reversed(self.all_nodes):
                await nodes.start(log_folder, self._cluster.start_timeout_seconds)
        except BaseException:
            await self.close()
            raise

    async def fork_ranks(
        self,
        log_folder: Path,
        num_trainers: int,
        replica_sizes: Sequence[int] = (),
        *,
        trainer: ParallelConfig | None = None,
        trainer_places: Sequence[RankPlace] = (),
        on_missing_engine: Callable[[str], object] | None = None,
    ) -> RunRanks:
        """Start the trainers' group, and one per separate engine replica, with the worker class `NodeReport`.

        `trainer` has the trainers' parallel sizes; None: nothing is trained. `trainer_places` empty: the first places.
        `on_missing_engine` gets the reason why a replica did not start while others did; None: it is raised.
        """
        num_ranks = num_trainers + sum(replica_sizes)
        places = list(trainer_places) or self.trainer_nodes.choose_places(num_trainers, (), on_one_node=False)
        used_places = list(places)
        # The trainers' group comes first, then one group per engine replica.
        group_starts: list[Coroutine[Any, Any, _Started]] = [
            self._fork_group(
                log_folder,
                PartOfRun(0, num_ranks, self._key),
                places,
                self.trainer_nodes,
                orders_kernels=trainer is not None and _splits_layers(trainer),
            )
        ]
        first_rank = num_trainers
        for size in replica_sizes:
            places = self._choose_replica_places(size, used_places)
            used_places += places
            part = PartOfRun(first_rank, num_ranks, self._key)
            group_start = self._fork_group(log_folder, part, places, self.engine_nodes)
            group_starts.append(group_start if on_missing_engine is None else _return_start_error(group_start))
            first_rank += size
        # Without trainers there is no run. A run can go on without some of its replicas.
        trainers, *replicas = await _start_together(group_starts)
        replica_groups = [replica for replica in replicas if isinstance(replica, WorkerGroup)]
        replica_errors = [replica for replica in replicas if isinstance(replica, MegarlError)]
        assert isinstance(trainers, WorkerGroup)
        if replica_errors and not replica_groups:
            await trainers.close()
            raise replica_errors[0]
        for error in replica_errors:
            assert on_missing_engine is not None
            on_missing_engine(str(error))
        return RunRanks(trainers, replica_groups)

    async def fork_replica(
        self, lost_group: WorkerGroup, groups: Sequence[WorkerGroup], log_folder: Path
    ) -> WorkerGroup:
        """Start the ranks of a lost engine replica again, next to the living `groups`.

        Raises ConfigError or PeerLostError without places for them.
        """
        await self.engine_nodes.replace_lost(self._cluster.start_timeout_seconds)
        places = self._choose_replica_places(
            lost_group.world_size, [place for group in groups for place in group.places]
        )
        return await self._fork_group(log_folder, lost_group.part, places, self.engine_nodes)

    def _choose_replica_places(self, size: int, used_places: Collection[RankPlace]) -> list[RankPlace]:
        """Return free places for an engine replica. `used_places` may include nodes of another kind."""
        nodes = self.engine_nodes
        used_engine_places = {
            (place.node_number, place.local_rank) for place in used_places if place.agent in nodes.agents
        }
        return nodes.choose_places(size, used_engine_places, on_one_node=True)

    async def _fork_group(
        self,
        log_folder: Path,
        part: PartOfRun,
        places: Sequence[RankPlace],
        nodes: Nodes,
        *,
        orders_kernels: bool = False,
    ) -> WorkerGroup:
        """Start one group of ranks. `orders_kernels`: a GPU starts kernels in the order of their launches."""
        cluster = self._cluster
        environment = _make_environment(cluster, nodes.kind.ranks_per_node, orders_kernels=orders_kernels)
        return await WorkerGroup(len(places), part, places=places).start(
            "megarl.cluster.checks.node_report:NodeReport",
            {},
            log_folder=log_folder,
            start_timeout_seconds=cluster.start_timeout_seconds,
            environment={**environment, **_flight_recorder_variables(cluster, log_folder, part.first_rank)},
            imports=_list_forkable_imports(),
        )

    async def reserve(self, num_trainers: int, replica_sizes: Sequence[int]) -> None:
        """Start agents until there are places for these ranks. Raises ConfigError if there are too few."""
        num_engine_ranks = sum(replica_sizes)
        ranks_by_nodes = {self.trainer_nodes: num_trainers}
        ranks_by_nodes[self.engine_nodes] = ranks_by_nodes.get(self.engine_nodes, 0) + num_engine_ranks
        for nodes, num_ranks in ranks_by_nodes.items():
            if not nodes.is_unlimited:
                num_nodes = divide_up(num_ranks, by=nodes.kind.ranks_per_node)
                await nodes.replenish(num_nodes, self._cluster.start_timeout_seconds)

    async def replace_lost_nodes(self) -> None:
        """Replace all lost nodes. Raises ConfigError or PeerLostError if there are no others."""
        for nodes in self.all_nodes:
            await nodes.replace_lost(self._cluster.start_timeout_seconds)

    @property
    def agents(self) -> list[AgentLink]:
        return [agent for nodes in self.all_nodes for agent in nodes.agents]

    def on_signal(self, callback: Callable[[str], object]) -> None:
        for nodes in self.all_nodes:
            nodes.on_signal = callback

    async def close(self) -> None:
        await asyncio.gather(*(nodes.close() for nodes in self.all_nodes))


async def start_ranks(
    cluster: ClusterConfig,
    log_folder: Path,
    replica_sizes: Sequence[int] = (),
    *,
    avoided_nodes: Sequence[str] = (),
    trainer: ParallelConfig | None = None,
) -> RunRanks:
    """Start a cluster's nodes and ranks. `close` of the result ends both.

    `replica_sizes` are the ranks of separate engine replicas. The trainers have the others, with parallel sizes
    `trainer` (None: nothing is trained). Ray avoids `avoided_nodes`.
    """
    nodes = await start_nodes(cluster, log_folder, avoided_nodes)
    try:
        num_trainers = cluster.world_size - sum(replica_sizes)
        ranks = await nodes.fork_ranks(log_folder, num_trainers, replica_sizes, trainer=trainer)
    except BaseException:
        await nodes.close()
        raise
    ranks.nodes = nodes
    return ranks


async def start_nodes(cluster: ClusterConfig, log_folder: Path, avoided_nodes: Sequence[str] = ()) -> RunNodes:
    """Start the agents of a cluster's nodes. Ray avoids `avoided_nodes`.

    Raises ConfigError or DiskFullError if this machine runs the ranks and lacks the device or writable shared memory.
    """
    if cluster.launcher == "local":
        device.require(cluster.device)
        check_shared_memory()
    nodes = RunNodes(cluster, avoided_nodes)
    await nodes.start(log_folder)
    return nodes


_Started = WorkerGroup | MegarlError
"""A started group, or why it did not start."""


async def _return_start_error(group_start: Coroutine[Any, Any, _Started]) -> _Started:
    try:
        return await group_start
    except MegarlError as error:
        return error


async def _start_together(starts: Sequence[Coroutine[Any, Any, _Started]]) -> list[_Started]:
    """Start groups concurrently. If one fails, close the others and raise its error."""
    start_tasks = [asyncio.ensure_future(group_start) for group_start in starts]
    try:
        return await asyncio.gather(*start_tasks)
    except BaseException:
        # A group that has started, or is about to, must not outlive the failed start.
        for start_task in start_tasks:
            start_task.cancel()
        groups_and_errors = await asyncio.gather(*start_tasks, return_exceptions=True)
        await asyncio.gather(*(group.close() for group in groups_and_errors if isinstance(group, WorkerGroup)))
        raise


def _flight_recorder_variables(cluster: ClusterConfig, log_folder: Path, first_rank: int) -> dict[str, str]:
    """Return variables that make NCCL's flight recorder write a file when a collective times out.

    Rank N of a group writes `flight_FIRST_N` to the log folder, where FIRST is `first_rank`. Variables of the user win.
    Empty on the CPU, which has no NCCL.
    """
    if cluster.device == "cpu" or not chosen_device.has_cuda_build():
        return {}
    variables = {
        # Number of newest collectives in the file: several steps of a large model.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{log_folder.absolute()}/flight_{first_rank}_",
    }
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def _splits_layers(trainer: ParallelConfig) -> bool:
    """Return whether Megatron splits layers over ranks, and overlaps transfers inside a layer with matrix products.

    Megatron-Core 0.16 launches such a transfer first, and relies on kernels starting in this order.
    """
    # Without split layers, a fixed order of kernels would only make independent streams wait.
    return max(trainer.tp, trainer.cp, trainer.etp) > 1


def _make_nodes(cluster: ClusterConfig, kind: NodeKind, avoided_nodes: Sequence[str]) -> Nodes:
    """Return the nodes of one kind, as the recipe's launcher manages them."""
    environment = _make_environment(cluster, kind.ranks_per_node)
    if cluster.launcher == "slurm":
        return SrunNodes(kind, environment, _list_forkable_imports(), cluster.srun_options)
    if cluster.launcher == "ray":
        # Imported here, because Ray is optional.
        from megarl.cluster.launchers.ray import RayNodes

        return RayNodes(kind, environment, _list_forkable_imports(), cluster.ray_address, avoided_nodes=avoided_nodes)
    return LocalNodes(environment, _list_forkable_imports(), _early.take(), ranks_per_node=kind.ranks_per_node)


def server_processes(cluster: ClusterConfig) -> MakeServer:
    """Return a function that creates reward and environment processes: here, or on the run's Ray cluster."""
    if cluster.launcher != "ray":
        return ServerProcess
    # Imported here, because Ray is optional.
    from megarl.processes.on_ray import round_robin_over_nodes

    return round_robin_over_nodes()
