"""The launchers of a recipe's processes: this machine, srun, Ray."""

from __future__ import annotations

from pathlib import Path

from megarl.cluster.local import LocalGroup
from megarl.cluster.srun import SrunGroup
from megarl.cluster.worker_group import WorkerGroup
from megarl.config import ClusterConfig
from megarl.environments.process import EnvironmentProcess, MakeProcess
from megarl.platform import device
from megarl.platform.shared_memory import check_shared_memory
from megarl.rewards.scoring import MakeScorer
from megarl.rewards.worker import RewardWorker


async def start_ranks(cluster: ClusterConfig, log_folder: Path) -> WorkerGroup:
    """Start the ranks of a cluster, with a `NodeReport` as first worker; see `WorkerGroup.start`.

    Raises ConfigError or DiskFullError if this machine is to run them and its shared memory cannot be written.
    """
    if cluster.launcher == "local":
        check_shared_memory()
    return await _group(cluster).start(
        "megarl.cluster.node_checks:NodeReport",
        {},
        log_folder=log_folder,
        start_timeout_seconds=cluster.start_timeout_seconds,
        environment=device.rank_environment(cluster.ranks_per_node),
    )


def _group(cluster: ClusterConfig) -> WorkerGroup:
    if cluster.launcher == "slurm":
        return SrunGroup(cluster.world_size, cluster.srun_options)
    if cluster.launcher == "ray":
        from megarl.cluster.ray import RayGroup

        return RayGroup(cluster.world_size, cluster.ray_address, cluster.ranks_per_node)
    return LocalGroup(cluster.world_size, imports=device.forkable_imports("megarl.worker"))


def reward_workers(cluster: ClusterConfig) -> MakeScorer:
    """The constructor of reward processes: on this machine, or on any node of the ranks' Ray cluster."""
    if cluster.launcher != "ray":
        return RewardWorker
    from megarl.rewards.on_ray import on_nodes_in_turn

    return on_nodes_in_turn()


def environment_processes(cluster: ClusterConfig) -> MakeProcess:
    """The constructor of environments' processes: on this machine, or on any node of the ranks' Ray cluster."""
    if cluster.launcher != "ray":
        return EnvironmentProcess
    from megarl.cluster.ray import environments_on_nodes_in_turn

    return environments_on_nodes_in_turn()
