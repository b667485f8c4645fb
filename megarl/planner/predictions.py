"""Predicted memory of a recipe on the GPUs of its run, or on this machine's CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.published import published_name
from megarl.families.shape import planned_shape
from megarl.planner import model_sizes, sizes
from megarl.planner.gpus_of_run import gpu_memory, platform_here, ranks_on_cpu
from megarl.planner.memory.devices import CPU, GPU
from megarl.planner.memory.memory_table import MemoryTable
from megarl.planner.memory.models import Models, read_models
from megarl.planner.memory.node_bytes import RankHostBytes, rank_host_bytes
from megarl.planner.memory.phases import memory_table
from megarl.types import DataError


def models_of(recipe: Recipe, parallel: ParallelConfig) -> Models:
    """Raises DataError for an invalid config.json."""
    shape = planned_shape(recipe.model.folder, recipe.model.override_config)
    return read_models(recipe, shape, parallel, sizes.parallel_of(recipe.for_teachers))


def planned_models(recipe: Recipe) -> Models | None:
    """Return the models of a recipe. None: memory cannot be predicted; other checks report the reason."""
    if any(sizes.find_rank_faults(recipe)):
        return None
    try:
        models = models_of(recipe, sizes.parallel_of(recipe))
    except DataError:
        return None
    return None if any(model_sizes.find_size_faults(recipe, models.policy.shape)) else models


def not_downloaded(recipe: Recipe) -> Iterator[str]:
    """Yield a notice for each model that is not on this machine: a built-in table has its sizes."""
    for folder in dict.fromkeys((recipe.model.folder, *recipe.further_models.values())):
        if not Path(folder).is_dir() and (name := published_name(folder)) is not None:
            yield (
                f"{folder} is not on this machine, so memory is predicted with the sizes of {name}; before a start: hf "
                f"download {name}"
            )


def table_of(recipe: Recipe, parallel: ParallelConfig) -> MemoryTable:
    """Return a recipe's predicted memory, for GPUs if the recipe or this environment has any."""
    gpus = gpu_memory(recipe)
    is_gpu = gpus is not None or not ranks_on_cpu(recipe)
    return memory_table(recipe, models_of(recipe, parallel), GPU if is_gpu else CPU, gpu_gib=gpus and gpus.engine)


def predicted_memory(recipe: Recipe) -> dict[str, int]:
    """Return the predicted bytes of the fullest rank, keyed by PHASE of the metrics memory/PHASE_gib."""
    return _predict_table(recipe, models_of(recipe, sizes.parallel_of(recipe))).bytes_by_metric()


def planned_host_bytes(recipe: Recipe) -> RankHostBytes | None:
    """Return the predicted host memory of a rank on GPUs, by kind of rank, or None (`list_resource_warnings`)."""
    if ranks_on_cpu(recipe) or (models := planned_models(recipe)) is None:
        return None
    return rank_host_bytes(_predict_table(recipe, models))


def _predict_table(recipe: Recipe, models: Models) -> MemoryTable:
    gpus = gpu_memory(recipe)
    return memory_table(recipe, models, platform_here(recipe), gpu_gib=gpus and gpus.engine)
