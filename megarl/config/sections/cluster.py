"""Recipe section `cluster`: nodes, ranks, launchers, deadlines."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from megarl.config.annotations import UntriedOnGpu
from megarl.config.section import Section

# GPUs known by name, so that a plan for another cluster needs no number.
GpuKind = PositiveFloat | Literal["h100", "h200", "b200"]


def _require_one_line(option: str) -> str:
    """Refuse control characters: a line end would start a new line of the Slurm batch script."""
    if any(ord(character) < 32 or ord(character) == 127 for character in option):
        raise PydanticCustomError("option", "has a line end or another control character; write one option per item")
    return option


CommandOption = Annotated[str, AfterValidator(_require_one_line)]
"""Option of sbatch or srun, for example --partition=NAME."""


def _require_resource_name(name: str) -> str:
    """Refuse quotes and $ in the name of a Ray resource: KubeRay puts it into a shell command."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]*", name) is None:
        raise PydanticCustomError("resource", "is not the name of a Ray resource: use letters, digits and _ . : / -")
    return name


RayResource = Annotated[str, AfterValidator(_require_resource_name)]
"""Name of a Ray resource, for example accelerator_type:H100."""


class NodeGroup(Section):
    """Nodes for separate engines, if they differ from the trainer's nodes."""

    nodes: PositiveInt = 1
    """Number of nodes (machines) in this group."""
    ranks_per_node: PositiveInt = 1
    """Number of ranks on each node of this group. On nodes with GPUs: the number of GPUs to use."""
    gpu_memory_gib: GpuKind | None = None
    """GPU memory of this group's nodes, in GiB, or the kind of GPU. Default: cluster.gpu_memory_gib."""
    sbatch_options: tuple[CommandOption, ...] = ()
    """sbatch options for this group's nodes in a job of `megarl slurm`, for example --partition=NAME. Options given by
    --sbatch on the command line apply to the trainer's nodes only."""
    # An amount of 0.001 selects the nodes without using up the resource.
    ray_resources: dict[RayResource, PositiveFloat] = Field(default_factory=dict)
    """Ray resources of this group's nodes, by Ray's names, for example {"accelerator_type:H100": 0.001}. Needed if this
    group's nodes have as many GPUs (CPUs) as other nodes."""

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class GroupsConfig(Section):
    """Groups of nodes with other hardware than the trainer's nodes, one field per purpose."""

    engines: NodeGroup | None = None
    """Nodes for the engines only, if their hardware differs from the trainer's (rollout.placement separate).
    cluster.nodes and cluster.ranks_per_node then count the trainer's nodes only. Slurm: a heterogeneous job (`megarl
    slurm submit`). `megarl eval` samples on the trainer's nodes."""


class ClusterConfig(Section):
    """Machines of a run: nodes, ranks, launcher and deadlines."""

    launcher: Literal["local", "slurm", "ray"] = "local"
    """Launcher of the agents; a node's agent starts its ranks. local (default): this machine. slurm: srun starts one
    agent on each node of a Slurm job (launch/slurm/train.sbatch). ray: one actor on each node of a Ray cluster."""
    ray_address: str = "auto"
    """Address of the Ray cluster: HOST:PORT, or `auto` (default) for this machine's cluster."""
    nodes: PositiveInt = 1
    """Number of nodes (machines) in the job."""
    ranks_per_node: PositiveInt = 1
    """Number of ranks on each node. On nodes with GPUs: the number of GPUs to use."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. auto (default): cuda on nodes with NVIDIA GPUs, else cpu. If torch cannot use a GPU (an old
    driver, for example), the start fails: megarl never falls back to the CPU."""
    bind_to_numa: bool = True
    """Bind each rank to its share of the cores of its GPU's NUMA node (`megarl doctor` prints the map). Default: true.
    No effect on a CPU."""
    start_timeout_seconds: PositiveFloat = 300.0
    """Deadline in seconds for the agents of all nodes to connect, and for all ranks to start."""
    build_timeout_seconds: PositiveFloat = 3600.0
    """Deadline in seconds for all ranks to build and load their models. The error names a rank that hangs."""
    # The first three calls of a kind have collective_timeout_seconds: they compile kernels and create process groups,
    # so their times predict nothing. Planned sampling time is added. Every verb_timeout_seconds the driver also looks
    # for stopped processes.
    verb_timeout_seconds: PositiveFloat = 300.0
    """Minimum deadline in seconds of a call to all ranks (an update, a reshard). The deadline is ten times the longest
    earlier call of its kind, at most collective_timeout_seconds. A rank that misses it, or is stopped (SIGSTOP), ends
    the run; the error names the rank. See megarl/loops/README.md#hangs."""
    checkpoint_timeout_seconds: PositiveFloat = 3600.0
    """Deadline in seconds for writing or reading a checkpoint, or exporting a model."""
    collective_timeout_seconds: PositiveFloat = 1800.0
    """Timeout of torch.distributed collectives in seconds. A collective that takes longer ends the run."""
    signal_seconds: PositiveInt = 300
    """Slurm signals the run to save this many seconds before the job's time limit. Choose more than an update and a
    checkpoint take together."""
    srun_options: tuple[CommandOption, ...] = ()
    """Further options of srun, for example --container-image=FILE and --container-mounts=FROM:TO. A node has one task,
    which needs all its GPUs, so leave out --gpus-per-task."""
    preflight: bool = True
    """Check every node before models are built: folders, disk, GPUs, clock, ports, bandwidth. Default: true."""
    min_bandwidth_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.25
    """Minimum bandwidth of a rank, as a fraction of the median of all ranks. With a slower rank the run does not start;
    the error names the rank's node."""
    peak_tflops: PositiveFloat | None = None
    """Peak speed of one rank's device at `model.dtype`, in TFLOP/s, for the metric perf/mfu. Default: known for common
    GPUs. Where it is unknown (a CPU, for example), perf/mfu is not logged."""
    groups: GroupsConfig = GroupsConfig()
    """Groups of nodes with other hardware than the trainer's nodes. `groups.engines`: nodes of separate engines.
    Default: all nodes are alike."""
    gpu_memory_gib: GpuKind | None = None
    """Memory of one GPU in GiB, or its kind (h100, h200, b200). A run with a higher predicted memory does not start;
    the error suggests changes (see `megarl plan`). Default: read from this machine's GPUs; without GPUs, no check."""
    recover: Annotated[Literal["stop", "restart", "shrink"], UntriedOnGpu("restart or shrink")] = "stop"
    """Reaction to a lost trainer process. stop: end with exit code 76. restart: start all ranks again, if necessary on
    another node. shrink: go on with fewer data-parallel replicas, later grow back (slurm, ray). Default: stop; on GPUs
    restart, if host memory can hold checkpoint.replicate's copies. megarl/loops/README.md#lost-ranks-and-other-sizes"""
    spare_nodes: NonNegativeInt = 0
    """Nodes of the Slurm job beyond cluster.nodes. With cluster.recover=restart, a spare node replaces a dead one.
    `megarl slurm` requests these nodes. A batch script of your own must request them, and set MEGARL_SPARE_NODES to
    their number."""
    max_restarts: NonNegativeInt = 5
    """Maximum number of consecutive automatic restarts of a run without a completed training step between them."""

    @property
    def world_size(self) -> int:
        """All ranks. Separate engines have the last ones."""
        return self.nodes * self.ranks_per_node + (self.groups.engines.num_ranks if self.groups.engines else 0)

    @property
    def num_nodes(self) -> int:
        return self.nodes + (self.groups.engines.nodes if self.groups.engines else 0)

    @property
    def rank_product(self) -> str:
        """Return the number of ranks for a message: `cluster.nodes 2 * cluster.ranks_per_node 8`."""
        trainer_product = f"cluster.nodes {self.nodes} * cluster.ranks_per_node {self.ranks_per_node}"
        if (engines := self.groups.engines) is None:
            return trainer_product
        return f"{trainer_product} + cluster.groups.engines {engines.nodes} * {engines.ranks_per_node}"
