"""Machines of a run: nodes, ranks, launchers, deadlines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from megarl.config.section import Section

GpuKind = PositiveFloat | Literal["h100", "h200", "b200"]


def _on_one_line(option: str) -> str:
    """Return the option. Raises where it has a control character: a line end would begin a line of the batch script."""
    if any(ord(character) < 32 or ord(character) == 127 for character in option):
        raise PydanticCustomError("option", "has a line end or another control character; give one option an item")
    return option


CommandOption = Annotated[str, AfterValidator(_on_one_line)]
"""An option of sbatch or srun, such as --partition=NAME."""


class NodeGroup(Section):
    """Nodes of a kind of their own."""

    nodes: PositiveInt = 1
    """Number of nodes (machines)."""
    ranks_per_node: PositiveInt = 1
    """Ranks on each of them: one per GPU, or one per CPU slot."""
    gpu_memory_gib: GpuKind | None = None
    """Memory of their GPUs, as cluster.gpu_memory_gib is of the others; default: the same."""
    sbatch_options: tuple[CommandOption, ...] = ()
    """Options of sbatch for them in a job of `megarl slurm`, such as --partition=NAME; those of its --sbatch are for
    the trainer's nodes."""
    ray_resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Resources of Ray's nodes of this kind, by Ray's names, where their GPUs (CPUs) alone do not tell them from the
    others: {"accelerator_type:H100": 0.001}."""

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class GroupsConfig(Section):
    engines: NodeGroup | None = None
    """The nodes of separate engines (rollout.placement), where these are of another kind than the trainer's: then
    cluster.nodes and cluster.ranks_per_node are the trainer's alone, and rollout.ranks are all ranks of these. Under
    Slurm the job is a heterogeneous one (`megarl slurm submit` makes it). `megarl eval` samples on the trainer's."""


class ClusterConfig(Section):
    launcher: Literal["local", "slurm", "ray"] = "local"
    """Launcher of the ranks: `local` spawns processes on this machine; `slurm` has srun start a task per rank within a
    job (launch/slurm/train.sbatch); `ray` places an actor per rank on a Ray cluster."""
    ray_address: str = "auto"
    """Address of the Ray cluster: HOST:PORT, or `auto` for the one that this machine belongs to."""
    nodes: PositiveInt = 1
    """Number of nodes (machines) in the job."""
    ranks_per_node: PositiveInt = 1
    """Ranks on each node: one per GPU, or one per CPU slot."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. `auto`: `cuda` on nodes with NVIDIA GPUs, else `cpu`. A GPU that torch cannot use, as with
    an old driver, is an error, never a CPU."""
    start_timeout_seconds: PositiveFloat = 300.0
    """Seconds within which all ranks must have connected."""
    build_timeout_seconds: PositiveFloat = 3600.0
    """Seconds within which all ranks must have built and loaded their models; a rank that hangs is named."""
    verb_timeout_seconds: PositiveFloat = 300.0
    """Give up if a rank has not answered a call, such as an update or a reshard, after this long or after ten times
    the longest that this call has taken so far, whichever is more. A call's first three may take
    collective_timeout_seconds, and later ones take no more, unless this field is larger. Sampling may take the time
    that it was given besides. Who is late is named, with the stacks of all ranks."""
    checkpoint_timeout_seconds: PositiveFloat = 3600.0
    """Seconds within which a checkpoint must be written or read, or a model exported."""
    collective_timeout_seconds: PositiveFloat = 1800.0
    """Timeout of torch.distributed collectives in seconds; exceeding it ends the run."""
    signal_seconds: PositiveInt = 300
    """Seconds before its time limit at which a Slurm job is told to save: more than updates and a checkpoint take."""
    srun_options: tuple[CommandOption, ...] = ()
    """Further options of srun, such as --container-image=FILE and --container-mounts=FROM:TO."""
    preflight: bool = True
    """Check every node before models are built: folders, disk, GPUs, clock, ports, bandwidth."""
    min_bandwidth_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.25
    """Refuse a node whose slowest rank has less than this fraction of the median rank's bandwidth."""
    peak_tflops: PositiveFloat | None = None
    """Peak of a rank's device at `model.dtype` in TFLOP/s, which perf/mfu is the share of; default: that of the GPU by
    its name, where it is a known one. Without it, as on a CPU, there is no perf/mfu."""
    groups: GroupsConfig = GroupsConfig()
    gpu_memory_gib: GpuKind | None = None
    """Memory of a GPU in GiB, or its kind: a recipe that would not fit is refused before a start, with changes that
    fit (`megarl plan` prints the table). Default: that of this machine's GPUs; where it has none, nothing is refused.
    """
    max_restarts: NonNegativeInt = 5
    """Consecutive restarts of a run without a step gained, at most."""

    @property
    def world_size(self) -> int:
        """All ranks, those of separate engines on nodes of their own kind last."""
        return self.nodes * self.ranks_per_node + (self.groups.engines.num_ranks if self.groups.engines else 0)

    @property
    def num_nodes(self) -> int:
        """All nodes."""
        return self.nodes + (self.groups.engines.nodes if self.groups.engines else 0)

    @property
    def described(self) -> str:
        """How many ranks there are, in terms of the fields."""
        own = f"cluster.nodes {self.nodes} * cluster.ranks_per_node {self.ranks_per_node}"
        if (engines := self.groups.engines) is None:
            return own
        return f"{own} + cluster.groups.engines {engines.nodes} * {engines.ranks_per_node}"
