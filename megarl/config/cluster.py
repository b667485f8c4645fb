"""Recipe section `cluster`: nodes, ranks, launchers, deadlines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from megarl.config.annotations import Foreign
from megarl.config.section import Section

# Kinds known by name, so that a plan for another cluster needs no figures.
GpuKind = PositiveFloat | Literal["h100", "h200", "b200"]


def _on_one_line(option: str) -> str:
    """Return the option. Raises PydanticCustomError if it has a control character.

    A line end would start a new line of the batch script.
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in option):
        raise PydanticCustomError("option", "has a line end or another control character; write one option per item")
    return option


CommandOption = Annotated[str, AfterValidator(_on_one_line)]
"""Option of sbatch or srun, for example --partition=NAME."""


class NodeGroup(Section):
    """Nodes of one kind, when it differs from the kind of the trainer's nodes."""

    nodes: PositiveInt = 1
    """Number of nodes (machines)."""
    ranks_per_node: PositiveInt = 1
    """Ranks on each of these nodes: one per GPU, or one per CPU slot."""
    gpu_memory_gib: GpuKind | None = None
    """Memory of these nodes' GPUs, written like cluster.gpu_memory_gib. Default: cluster.gpu_memory_gib."""
    sbatch_options: tuple[CommandOption, ...] = ()
    """sbatch options of these nodes in a job of `megarl slurm`, for example --partition=NAME. Its --sbatch options
    apply to the trainer's nodes only."""
    # An amount of 0.001 selects the nodes without using up the resource.
    ray_resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Ray resources of these nodes, by Ray's names, for example {"accelerator_type:H100": 0.001}. Needed if their GPU
    (CPU) counts do not distinguish them from other nodes."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks on these nodes."""
        return self.nodes * self.ranks_per_node


class GroupsConfig(Section):
    """Nodes of another kind than the trainer's, by their purpose."""

    engines: NodeGroup | None = None
    """Nodes of separate engines, if they differ from the trainer's (rollout.placement). All their ranks are
    rollout.ranks; cluster.nodes and cluster.ranks_per_node then count the trainer's only. Slurm: a heterogeneous job
    (`megarl slurm submit`). `megarl eval` samples on the trainer's nodes."""


class ClusterConfig(Section):
    """Machines of a run: nodes, ranks, launcher and deadlines."""

    launcher: Annotated[Literal["local", "slurm", "ray"],
        Foreign(note="the address of a Ray cluster", example="cluster.launcher=ray cluster.ray_address=10.0.0.1:6379",
            also="cluster.ray_address", ColossalRL="--master_address")] = "local"  # fmt: skip
    """Launcher of the ranks. local (default): processes on this machine. slurm: srun starts a task per rank within a
    job (launch/slurm/train.sbatch). ray: one actor per rank on a Ray cluster."""
    ray_address: str = "auto"
    """Address of the Ray cluster: HOST:PORT, or `auto` (default) for this machine's cluster."""
    nodes: Annotated[PositiveInt, Foreign("nnodes num_nodes actor_num_nodes", verl="trainer.nnodes")] = 1
    """Number of nodes (machines) in the job."""
    ranks_per_node: Annotated[PositiveInt,
        Foreign("n_gpus_per_node gpus_per_node actor_num_gpus_per_node num_gpus_per_node", example="8",
            verl="trainer.n_gpus_per_node"),
        Foreign(note="all ranks, rollout.ranks of them for sampling only",
            example="cluster.ranks_per_node=8 rollout.placement=separate rollout.ranks=4", short="t",
            ColossalRL="--num-trainers")] = 1  # fmt: skip
    """Ranks on each node: one per GPU, or one per CPU slot."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. auto (default): cuda on nodes with NVIDIA GPUs, else cpu. A GPU unusable by torch (an old
    driver, say) is an error, never replaced by the CPU."""
    start_timeout_seconds: PositiveFloat = 300.0
    """Deadline in seconds for all ranks to connect."""
    build_timeout_seconds: PositiveFloat = 3600.0
    """Deadline in seconds for all ranks to build and load their models. The error names a hanging rank."""
    # The first calls compile kernels and create process groups, so their times predict nothing.
    verb_timeout_seconds: PositiveFloat = 300.0
    """Deadline in seconds of a call to the ranks (an update, a reshard): this or ten times the longest earlier one, if
    more. The first three may take collective_timeout_seconds; later ones no more, unless this field is larger.
    Sampling's own time is added. The error names late ranks, with all stacks."""
    checkpoint_timeout_seconds: PositiveFloat = 3600.0
    """Deadline in seconds for writing or reading a checkpoint, or exporting a model."""
    collective_timeout_seconds: PositiveFloat = 1800.0
    """Timeout of torch.distributed collectives in seconds. Exceeding it ends the run."""
    signal_seconds: PositiveInt = 300
    """Seconds before the time limit at which Slurm signals the job to save. Choose more than updates and a checkpoint
    take."""
    srun_options: tuple[CommandOption, ...] = ()
    """Further srun options, for example --container-image=FILE and --container-mounts=FROM:TO."""
    preflight: bool = True
    """Check every node before models are built: folders, disk, GPUs, clock, ports, bandwidth. Default: true."""
    min_bandwidth_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.25
    """Refuse a node if its slowest rank has less than this fraction of the median rank's bandwidth."""
    peak_tflops: PositiveFloat | None = None
    """Peak of a rank's device at `model.dtype` in TFLOP/s, the denominator of perf/mfu. Default: by the GPU's name, if
    known. Without a peak (as on a CPU) there is no perf/mfu."""
    groups: GroupsConfig = GroupsConfig()
    """Separate engines on nodes of another kind than the trainer's nodes (groups.engines). Default: none."""
    gpu_memory_gib: GpuKind | None = None
    """Memory of a GPU in GiB, or its kind (h100, h200, b200). A recipe that does not fit is refused before a start,
    with suggested changes (see `megarl plan`). Default: this machine's GPUs; without GPUs nothing is refused."""
    max_restarts: NonNegativeInt = 5
    """Limit of consecutive restarts of a run without a new step."""

    @property
    def world_size(self) -> int:
        """Return the number of all ranks. Separate engines on nodes of their own kind are the last ones."""
        return self.nodes * self.ranks_per_node + (self.groups.engines.num_ranks if self.groups.engines else 0)

    @property
    def num_nodes(self) -> int:
        """Return the number of all nodes."""
        return self.nodes + (self.groups.engines.nodes if self.groups.engines else 0)

    @property
    def described(self) -> str:
        """Return the number of ranks in terms of recipe fields."""
        own = f"cluster.nodes {self.nodes} * cluster.ranks_per_node {self.ranks_per_node}"
        if (engines := self.groups.engines) is None:
            return own
        return f"{own} + cluster.groups.engines {engines.nodes} * {engines.ranks_per_node}"
