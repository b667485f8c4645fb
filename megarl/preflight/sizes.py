"""Checks of sizes: whether ranks can be started here, and whether ranks, batches and lengths fit each other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from megarl.config import Recipe
from megarl.config.sections.cluster import ClusterConfig
from megarl.planner import sizes
from megarl.preflight.registry import checks


@checks("cluster")
def check_machines(recipe: Recipe, *, is_start: bool = True) -> Iterator[str]:
    """Yield errors if the ranks cannot be started: from this machine (`is_start`), or by a job elsewhere."""
    cluster = recipe.cluster
    # A run resized within its job may have fewer ranks than the job has tasks.
    if cluster.launcher == "slurm" and is_start:
        yield from _find_job_faults(cluster)
    if cluster.launcher == "ray" and find_spec("ray") is None:
        yield "cluster.launcher = ray: Ray is not installed; run launch/setup.sh ray, or set cluster.launcher=local"
    if cluster.launcher == "local" and cluster.groups.engines is not None and is_start:
        yield (
            "cluster.groups.engines: cluster.launcher local uses this machine only; leave the group out and give "
            "rollout.ranks, or run megarl slurm submit"
        )
    elif cluster.launcher == "local" and cluster.nodes > 1 and is_start:
        yield (
            f"cluster.nodes = {cluster.nodes}: cluster.launcher local uses this machine only; set cluster.nodes=1 "
            f"cluster.ranks_per_node={cluster.world_size}, or run megarl slurm submit"
        )


def _find_job_faults(cluster: ClusterConfig) -> Iterator[str]:
    """Yield an error if this Slurm job does not have the recipe's nodes and tasks, or if this is no Slurm job."""
    # Slurm sets these variables only inside a job, so a dry run on a login node finds none.
    job_nodes, job_tasks_per_node = os.environ.get("SLURM_JOB_NUM_NODES"), os.environ.get("SLURM_NTASKS_PER_NODE")
    if job_nodes is None:
        yield (
            "cluster.launcher = slurm: this is no Slurm job; submit one with megarl slurm submit, or set "
            "cluster.launcher=local"
        )
    elif shutil.which("srun") is None:
        yield (
            "cluster.launcher = slurm: this job has no program srun on its PATH; add Slurm's folder of programs to "
            "PATH, or set cluster.launcher=local"
        )
    elif cluster.groups.engines is not None:
        yield from _find_component_faults(cluster)
    elif int(job_nodes) != cluster.nodes + cluster.spare_nodes:
        num_needed_nodes, num_spare = cluster.nodes + cluster.spare_nodes, cluster.spare_nodes
        spare_text = f" and cluster.spare_nodes = {num_spare}" if num_spare else ""
        yield (
            f"cluster.nodes = {cluster.nodes}{spare_text}: the job has {job_nodes} nodes, not {num_needed_nodes}; "
            f"set cluster.nodes={int(job_nodes) - num_spare}, or submit it with sbatch --nodes={num_needed_nodes}"
        )
    elif (
        job_tasks_per_node is not None
        and job_tasks_per_node.isdigit()
        and int(job_tasks_per_node) != cluster.ranks_per_node
    ):
        yield (
            f"cluster.ranks_per_node = {cluster.ranks_per_node}: the job has {job_tasks_per_node} tasks a node; "
            f"set cluster.ranks_per_node={job_tasks_per_node}, or sbatch --ntasks-per-node"
        )


def _find_component_faults(cluster: ClusterConfig) -> Iterator[str]:
    """Yield an error unless trainer nodes and engine nodes are the two components of a heterogeneous Slurm job."""
    engines = cluster.groups.engines
    assert engines is not None
    # Slurm numbers the components of a heterogeneous job from 0. The trainer's nodes come first.
    component_nodes = [os.environ.get(f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}") for number in range(2)]
    expected_nodes = [str(cluster.nodes), str(engines.nodes)]
    if component_nodes != expected_nodes or os.environ.get("SLURM_HET_SIZE") != "2":
        nodes_text = (
            f"components of {', '.join(filter(None, component_nodes))} nodes"
            if any(component_nodes)
            else "one kind of nodes"
        )
        yield (
            f"cluster.groups.engines: the job has {nodes_text}, not components of {' and '.join(expected_nodes)}; "
            "submit it with megarl slurm submit"
        )


checks("trainer")(sizes.find_rank_faults)
checks("train")(sizes.find_batch_faults)


@checks("trainer")
def check_forward_rows(recipe: Recipe) -> Iterator[str]:
    """Yield an error if passes without gradients would have shorter rows than updates."""
    trainer = recipe.trainer
    if (
        forward_tokens := trainer.max_tokens_per_forward
    ) is not None and forward_tokens < trainer.max_tokens_per_microbatch:
        yield (
            f"trainer.max_tokens_per_forward = {forward_tokens}: is below trainer.max_tokens_per_microbatch = "
            f"{trainer.max_tokens_per_microbatch}, although passes without gradients need less memory; raise it to "
            f"{trainer.max_tokens_per_microbatch} or more, or leave it out"
        )


checks("trainer")(sizes.find_length_faults)
