"""Check if a recipe fits into its GPUs' memory, by the table of `megarl.memory_plan`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.memory_plan.devices import CPU, GPU, GPU_MEMORY_GIB, GpuMemory
from megarl.memory_plan.memory_table import MemoryTable
from megarl.memory_plan.node_bytes import RankHostBytes, rank_host_bytes
from megarl.memory_plan.phases import memory_table
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.visible_gpus import installed_gpu_gib, installed_gpus
from megarl.preflight import sizes
from megarl.preflight.planned_models import models_of
from megarl.preflight.verdict import Verdict, refusal, verdict_on_cpus, verdict_on_gpus, verdict_without_gpus
from megarl.types import DataError

_SAME_GPU = 0.95
"""An installed GPU counts as the named kind with at least this share of its nominal memory."""


def gpu_gib(recipe: Recipe) -> float | None:
    """Return the memory of the run's GPUs in GiB. None: unknown."""
    given = recipe.cluster.gpu_memory_gib
    if given is None:
        return installed_gpu_gib() if uses_this_machine(recipe) else None
    return GPU_MEMORY_GIB[given] if isinstance(given, str) else given


def gpu_kind(recipe: Recipe) -> str | None:
    """Return the kind of the trainer's GPUs (h200, say): as named in the recipe, else as installed. None: unknown."""
    if isinstance(given := recipe.cluster.gpu_memory_gib, str):
        return given
    names = [gpu.name.lower() for gpu in installed_gpus()] if uses_this_machine(recipe) else []
    return next((kind for kind in GPU_MEMORY_GIB if any(kind in name for name in names)), None)


def gpu_memory(recipe: Recipe) -> GpuMemory | None:
    """Return the memory of the trainer's and the engines' GPUs. None: the trainer's is unknown."""
    if (gib := gpu_gib(recipe)) is None:
        return None
    engines = recipe.cluster.groups.engines
    given = None if engines is None else engines.gpu_memory_gib
    return GpuMemory(gib, gib if given is None else GPU_MEMORY_GIB[given] if isinstance(given, str) else given)


def ranks_on_cpu(recipe: Recipe) -> bool:
    """Return whether ranks started in this environment run on CPUs."""
    return runs_on_cpu() or recipe.cluster.device == "cpu"


def uses_this_machine(recipe: Recipe) -> bool:
    """Return whether the run uses this machine's GPUs. A login node's GPUs do not count."""
    # Slurm sets SLURMD_NODENAME on a job's nodes only.
    return not ranks_on_cpu(recipe) and (recipe.cluster.launcher == "local" or "SLURMD_NODENAME" in os.environ)


def table_of(recipe: Recipe, layout: ParallelConfig) -> MemoryTable:
    """Return a recipe's memory by phase: on GPUs if they are named or the environment is for GPUs, else on CPUs."""
    gpus = gpu_memory(recipe)
    is_gpu = gpus is not None or not ranks_on_cpu(recipe)
    return memory_table(recipe, models_of(recipe, layout), GPU if is_gpu else CPU, gpu_gib=gpus and gpus.engine)


def verdict_of(recipe: Recipe, layout: ParallelConfig, table: MemoryTable) -> Verdict:
    """Return the verdict on a recipe's `table`, for named or installed GPUs or this machine's CPUs."""
    if (gpus := gpu_memory(recipe)) is not None:
        return verdict_on_gpus(recipe, models_of(recipe, layout), table, gpus)
    if table.is_gpu or recipe.cluster.launcher != "local" or recipe.cluster.nodes > 1:
        return verdict_without_gpus()
    return verdict_on_cpus(recipe, models_of(recipe, layout), table)


def predicted_memory(recipe: Recipe) -> dict[str, int]:
    """Return the predicted bytes of the fullest rank by the phases of `memory/PHASE_gib`, for ranks of this machine."""
    return _table_here(recipe).predicted()


def planned_host_bytes(recipe: Recipe) -> RankHostBytes | None:
    """Return a rank's bytes of host memory by kind of rank, on GPUs.

    None: the recipe cannot be planned, or ranks are on CPUs (covered by `resource_warnings`).
    """
    if ranks_on_cpu(recipe) or any(sizes.ranks(recipe)):
        return None
    try:
        models = models_of(recipe, sizes.layout_of(recipe))
    except DataError:
        return None
    return None if any(sizes.model_fit(recipe, models.policy.shape)) else rank_host_bytes(_table_here(recipe))


def _table_here(recipe: Recipe) -> MemoryTable:
    """Return a recipe's memory by phase for ranks of this machine."""
    platform = CPU if ranks_on_cpu(recipe) else GPU
    models = models_of(recipe, sizes.layout_of(recipe))
    gpus = gpu_memory(recipe)
    return memory_table(recipe, models, platform, gpu_gib=gpus and gpus.engine)


def memory_faults(recipe: Recipe, layout: ParallelConfig, *, is_start: bool) -> Iterator[str]:
    """Yield phases that need more than a GPU's memory, with the cheapest changes that fit."""
    if recipe.rollout.gpu_memory_utilization is not None and recipe.has_engine:
        yield from _utilization(recipe)
    yield from _other_gpu(recipe, is_start)
    if (gpus := gpu_memory(recipe)) is None:
        return
    try:
        models = models_of(recipe, layout)
    except DataError:
        return  # The checks of the model folder report it.
    table = memory_table(recipe, models, GPU, gpu_gib=gpus.engine)
    if over := gpus.exceeded(table):
        yield refusal(recipe, models, gpus, over)
    # Under gpu_memory_utilization the cache takes the remainder, so it is the cache that may be too small.
    elif table.cache is not None and not table.cache.longest_requests:
        yield (
            f"rollout.gpu_memory_utilization = {recipe.rollout.gpu_memory_utilization}: leaves a KV cache of "
            f"{table.cache.tokens} tokens, one request has up to {table.cache.longest}; raise it"
        )


def _utilization(recipe: Recipe) -> Iterator[str]:
    if gpu_gib(recipe) is None and runs_on_cpu():
        yield (
            f"rollout.gpu_memory_utilization = {recipe.rollout.gpu_memory_utilization}: a CPU has no GPU memory to "
            "take a share of; set rollout.kv_cache_gib instead"
        )


def _other_gpu(recipe: Recipe, is_start: bool) -> Iterator[str]:
    """Yield a fault if this machine's GPUs have less memory than the recipe says."""
    if not is_start or recipe.cluster.launcher != "local" or not uses_this_machine(recipe):
        return
    given, found = gpu_gib(recipe), installed_gpu_gib()
    if given is not None and found is not None and found < _SAME_GPU * given:
        yield (
            f"cluster.gpu_memory_gib = {recipe.cluster.gpu_memory_gib}: this machine's GPUs have {found:.1f} GiB; "
            "leave it out, or run on the GPUs that it names"
        )
