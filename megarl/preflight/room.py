"""Warnings about scarce resources of the machines (cores, host memory, KV cache). They never stop a start."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.memory.devices import CPU
from megarl.memory.phases import memory_table
from megarl.memory.table import MemoryTable
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.host_memory import machine_bytes
from megarl.preflight.memory import table_of
from megarl.preflight.planned_models import models_of
from megarl.sandbox.check import examine
from megarl.sandbox.layers import LAYERS

# Above this many ranks a core, ranks on CPUs mostly wait for each other.
_RANKS_PER_CORE = 4


def resource_warnings(recipe: Recipe, layout: ParallelConfig) -> Iterator[str]:
    """Yield warnings for a checked recipe on these machines, one line each."""
    yield from _weakened_sandbox(recipe)
    yield from small_cache(table_of(recipe, layout))
    cluster = recipe.cluster
    if cluster.launcher != "local":
        return
    if cluster.nodes > 1:
        yield (
            f"cluster.nodes = {cluster.nodes}: cluster.launcher local has this machine only, and megarl train would "
            "refuse that; megarl slurm submit runs it as a Slurm job"
        )
        return
    ranks, cores = cluster.ranks_per_node, len(os.sched_getaffinity(0))
    if ranks > _RANKS_PER_CORE * cores:
        yield (
            f"cluster.ranks_per_node = {ranks}: this machine has {cores} cores, so ranks would wait for each other; "
            f"use at most {_RANKS_PER_CORE * cores}"
        )
    memory = machine_bytes()
    # On GPUs the GPU memory is the limit, and the plan covers it.
    if not runs_on_cpu():
        return
    table = memory_table(recipe, models_of(recipe, layout), CPU)
    if (needed := table.host_bytes(layout.world_size, layout.rollout_ranks)) > memory:
        phases = " and ".join(phase.name for phase in table.fullest_host)
        yield (
            f"cluster.ranks_per_node = {ranks}: the ranks need {needed / 2**30:.1f} GiB of memory in the phase "
            f"{phases}, this machine has {memory / 2**30:.1f}; use fewer, or a smaller model (megarl plan prints "
            "what takes it)"
        )


def small_cache(table: MemoryTable) -> Iterator[str]:
    """Yield a warning if the engines' KV cache holds few of the concurrent requests."""
    if table.cache is not None and table.cache.warning is not None:
        yield table.cache.warning


def _weakened_sandbox(recipe: Recipe) -> Iterator[str]:
    """Yield a notice about sandbox layers missing on this machine and not required by the recipe."""
    if set(LAYERS) <= set(recipe.sandbox.require) or recipe.sandbox.url is not None:
        return
    if notice := examine().layers.notice(recipe.sandbox.require):
        yield notice
