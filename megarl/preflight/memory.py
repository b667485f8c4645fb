"""Whether a recipe fits into its GPUs' memory, by the table of `megarl.memory`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import read_model_shape
from megarl.memory.changes import Remedy, changed, remedies
from megarl.memory.devices import CPU, GPU, GPU_MEMORY_GIB, GpuMemory
from megarl.memory.models import Models, read_models
from megarl.memory.phases import memory_table
from megarl.memory.table import MemoryTable, Phase
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.visible_gpus import installed_gpu_gib
from megarl.preflight import sizes
from megarl.types import DataError

_GIB = 2**30
_SAME_GPU = 0.95
"""A GPU has at least this share of what is written of its kind."""


def gpu_gib(recipe: Recipe) -> float | None:
    """Memory of a GPU of the run in GiB; None where nothing says it."""
    given = recipe.cluster.gpu_memory_gib
    if given is None:
        return installed_gpu_gib() if uses_this_machine(recipe) else None
    return GPU_MEMORY_GIB[given] if isinstance(given, str) else given


def gpu_memory(recipe: Recipe) -> GpuMemory | None:
    """Memory of the trainer's GPUs and of the engines'; None where nothing says the former."""
    if (gib := gpu_gib(recipe)) is None:
        return None
    engines = recipe.cluster.groups.engines
    given = None if engines is None else engines.gpu_memory_gib
    return GpuMemory(gib, gib if given is None else GPU_MEMORY_GIB[given] if isinstance(given, str) else given)


def uses_this_machine(recipe: Recipe) -> bool:
    """Whether this machine's GPUs are the run's: not those of a login node, nor with the environment for CPUs."""
    return not runs_on_cpu() and (recipe.cluster.launcher == "local" or "SLURMD_NODENAME" in os.environ)


def models_of(recipe: Recipe, layout: ParallelConfig) -> Models:
    """The models of a recipe that can be planned. Raises DataError for a config.json."""
    shape = read_model_shape(recipe.model.folder, recipe.model.override_config)
    return read_models(recipe, shape, layout, sizes.layout_of(recipe.for_teachers))


def table_of(recipe: Recipe, layout: ParallelConfig) -> MemoryTable:
    """The memory of a recipe by phase: of GPUs where they are named or the environment is theirs, else a CPU's."""
    gpus = gpu_memory(recipe)
    is_gpu = gpus is not None or not runs_on_cpu()
    return memory_table(recipe, models_of(recipe, layout), GPU if is_gpu else CPU, gpu_gib=gpus and gpus.engine)


def predicted_memory(recipe: Recipe) -> dict[str, int]:
    """Bytes of the fullest rank by the phases of `memory/PHASE_gib`, as this machine's ranks will have it."""
    platform = CPU if runs_on_cpu() else GPU
    models = models_of(recipe, sizes.layout_of(recipe))
    gpus = gpu_memory(recipe)
    return memory_table(recipe, models, platform, gpu_gib=gpus and gpus.engine).predicted()


def memory_faults(recipe: Recipe, layout: ParallelConfig, *, is_start: bool) -> Iterator[str]:
    """Phases that take more than a GPU has, with the cheapest changes that fit."""
    if recipe.rollout.gpu_memory_utilization is not None and recipe.has_engine:
        yield from _utilization(recipe)
    yield from _other_gpu(recipe, is_start)
    if (gpus := gpu_memory(recipe)) is None:
        return
    try:
        models = models_of(recipe, layout)
    except DataError:
        return  # told already
    table = memory_table(recipe, models, GPU, gpu_gib=gpus.engine)
    if over := gpus.exceeded(table):
        yield _refusal(recipe, models, gpus, over)
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
    """The GPUs of this machine have less memory than the recipe says."""
    if not is_start or recipe.cluster.launcher != "local" or not uses_this_machine(recipe):
        return
    given, found = gpu_gib(recipe), installed_gpu_gib()
    if given is not None and found is not None and found < _SAME_GPU * given:
        yield (
            f"cluster.gpu_memory_gib = {recipe.cluster.gpu_memory_gib}: this machine's GPUs have {found:.1f} GiB; "
            "leave it out, or run on the GPUs that it names"
        )


def _refusal(recipe: Recipe, models: Models, gpus: GpuMemory, over: list[Phase]) -> str:
    told = "; ".join(
        f"{phase.name} takes {phase.device_bytes / _GIB:.1f} GiB on {phase.place}, "
        f"{phase.device_bytes / _GIB - gpus.of(phase):.1f} too much ({_largest(phase)})"
        for phase in sorted(over, key=lambda phase: -phase.device_bytes)
    )
    named, engines = recipe.cluster.gpu_memory_gib, recipe.cluster.groups.engines
    given = f"cluster.gpu_memory_gib = {named if named is not None else f'{gpus.trainer:.1f} (of this machine)'}"
    if engines is not None and engines.gpu_memory_gib is not None:
        given += f", cluster.groups.engines.gpu_memory_gib = {engines.gpu_memory_gib}"
    text = f"{given}: {told}"
    found = remedies(recipe, models, gpus)
    if found:
        return f"{text}; what fits: {', or '.join(' '.join(remedy.overrides) for remedy in found)}"
    if (wider := _wider(recipe, gpus)) is not None:
        return f"{text}; no offload, recomputation, cache or row length fits; what does: {wider}"
    return f"{text}; nothing that is tried fits: take more GPUs, or a smaller model"


def _largest(phase: Phase) -> str:
    """The three kinds that take most."""
    kinds = sorted(phase.uses, key=lambda use: -use.device_bytes)[:3]
    return ", ".join(f"{use.kind} {use.device_bytes / _GIB:.1f}" for use in kinds)


def _wider(recipe: Recipe, gpus: GpuMemory) -> str | None:
    """Twice a parallel size or the nodes, with the cheapest other change, under which the recipe fits."""
    trainer, cluster = recipe.trainer, recipe.cluster
    engines = ({"rollout.tp": 2 * recipe.rollout.tp},) if recipe.separate_ranks else ()
    for values in (
        *engines,
        {"trainer.tp": 2 * trainer.tp},
        {"trainer.pp": 2 * trainer.pp},
        {"cluster.nodes": 2 * cluster.nodes},
        {"trainer.tp": 2 * trainer.tp, "cluster.nodes": 2 * cluster.nodes},
        {"trainer.pp": 2 * trainer.pp, "cluster.nodes": 2 * cluster.nodes},
    ):
        other = changed(recipe, values if recipe.trainer.dp is None else {**values, "trainer.dp": None})
        layout = sizes.layout_of(other)
        models = models_of(other, layout)
        if any((*sizes.ranks(other), *sizes.batches(other, layout.dp), *sizes.model_fit(other, models.policy.shape))):
            continue
        table = memory_table(other, models, GPU, gpu_gib=gpus.engine)
        own = Remedy(values, table)
        if not gpus.exceeded(table):
            return " ".join(own.overrides)
        if found := remedies(other, models, gpus, most=1):
            return " ".join((*own.overrides, *found[0].overrides))
    return None
