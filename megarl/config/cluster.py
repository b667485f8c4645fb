"""Machines of a run: nodes, ranks, launchers, deadlines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.section import Section


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
    srun_options: tuple[str, ...] = ()
    """Further options of srun, such as --container-image=FILE and --container-mounts=FROM:TO."""
    preflight: bool = True
    """Check every node before models are built: folders, disk, GPUs, clock, ports, bandwidth."""
    min_bandwidth_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.25
    """Refuse a node whose slowest rank has less than this fraction of the median rank's bandwidth."""
    peak_tflops: PositiveFloat | None = None
    """Peak of a rank's device at `model.dtype` in TFLOP/s, which perf/mfu is the share of; default: that of the GPU by
    its name, where it is a known one. Without it, as on a CPU, there is no perf/mfu."""
    gpu_memory_gib: PositiveFloat | Literal["h100", "h200", "b200"] | None = None
    """Memory of a GPU in GiB, or its kind: a recipe that would not fit is refused before a start, with changes that
    fit (`megarl plan` prints the table). Default: that of this machine's GPUs; where it has none, nothing is refused.
    """
    max_restarts: NonNegativeInt = 5
    """Consecutive restarts of a run without a step gained, at most."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node
