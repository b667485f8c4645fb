"""Memory and kind of a run's GPUs, named in the recipe or installed in this machine."""

from __future__ import annotations

import os

from megarl.config import Recipe
from megarl.planner.memory.devices import CPU, GPU, GPU_MEMORY_GIB, GpuMemory, Platform
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.visible_gpus import installed_gpu_gib, installed_gpus

NAME_THE_GPU = "set cluster.gpu_memory_gib to h100, h200, b200 or GiB"
"""Last part of each message about unknown GPU memory."""


def gpu_gib(recipe: Recipe) -> float | None:
    memory = recipe.cluster.gpu_memory_gib
    if memory is None:
        return installed_gpu_gib() if uses_this_machine(recipe) else None
    return GPU_MEMORY_GIB[memory] if isinstance(memory, str) else memory


def gpu_kind(recipe: Recipe) -> str | None:
    """Return the kind of the trainer's GPUs (`h200`); None: unknown."""
    if isinstance(named_kind := recipe.cluster.gpu_memory_gib, str):
        return named_kind
    names = [gpu.name.lower() for gpu in installed_gpus()] if uses_this_machine(recipe) else []
    return next((kind for kind in GPU_MEMORY_GIB if any(kind in name for name in names)), None)


def gpu_memory(recipe: Recipe) -> GpuMemory | None:
    """Return the memory of the trainer's and the engines' GPUs. None: the trainer's is unknown."""
    if (trainer_gib := gpu_gib(recipe)) is None:
        return None
    engines = recipe.cluster.groups.engines
    engine_gib = None if engines is None else engines.gpu_memory_gib
    if isinstance(engine_gib, str):
        engine_gib = GPU_MEMORY_GIB[engine_gib]
    return GpuMemory(trainer=trainer_gib, engine=trainer_gib if engine_gib is None else engine_gib)


def ranks_on_cpu(recipe: Recipe) -> bool:
    return runs_on_cpu() or recipe.cluster.device == "cpu"


def uses_this_machine(recipe: Recipe) -> bool:
    """Return whether the run uses this machine's GPUs: not on a cluster's login node."""
    # Slurm sets SLURMD_NODENAME only on the nodes of a job.
    return not ranks_on_cpu(recipe) and (recipe.cluster.launcher == "local" or "SLURMD_NODENAME" in os.environ)


def platform_here(recipe: Recipe) -> Platform:
    return CPU if ranks_on_cpu(recipe) else GPU
