"""Check whether a recipe's predicted memory (`megarl.memory_plan`) fits into the GPUs, and how to make it fit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.published import published_name
from megarl.families.shape import planned_shape
from megarl.memory_plan.devices import CPU, GPU, GPU_MEMORY_GIB, GpuMemory, Platform
from megarl.memory_plan.memory_table import MemoryTable, Phase
from megarl.memory_plan.models import Models, read_models
from megarl.memory_plan.node_bytes import RankHostBytes, fullest_node_bytes, rank_host_bytes
from megarl.memory_plan.phases import memory_table
from megarl.memory_plan.remedies import Remedy, remedies, with_field_values
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.memory.host_memory import machine_bytes
from megarl.platform.visible_gpus import installed_gpu_gib, installed_gpus
from megarl.preflight import sizes
from megarl.preflight.model import model_sizes
from megarl.preflight.vllm_limits import default_cache_gib, least_cache_gib
from megarl.types import DataError


def models_of(recipe: Recipe, parallel: ParallelConfig) -> Models:
    """Return the models of a recipe, as needed to predict memory. Raises DataError for an invalid config.json."""
    shape = planned_shape(recipe.model.folder, recipe.model.override_config)
    return read_models(recipe, shape, parallel, sizes.parallel_of(recipe.for_teachers))


def not_downloaded(recipe: Recipe) -> Iterator[str]:
    """Yield a notice for each model whose folder is not on this machine. A built-in table gives its sizes."""
    for folder in dict.fromkeys((recipe.model.folder, *recipe.further_models.values())):
        if not Path(folder).is_dir() and (name := published_name(folder)) is not None:
            yield (
                f"{folder} is not there, so memory is predicted with the sizes of {name}; before a start: hf download "
                f"{name}"
            )


_GIB = 2**30
_NOTHING = "none of the changes tried fits: use more GPUs, or a smaller model"
_NOTHING_ON_CPUS = "no larger KV cache fits: lower rollout.sampling.max_new_tokens, or use a smaller model"
NAME_THE_GPU = "set cluster.gpu_memory_gib to h100, h200, b200 or GiB"
"""End of a message about unknown GPU memory: what to set."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of comparing a recipe's predicted memory with the available memory. `text` is one line about it."""

    fits: bool | None
    """Whether the recipe fits. None: the available memory is unknown."""
    text: str
    limits: dict[str, int]
    """Available bytes by phase: of one GPU, or on CPUs of the whole host."""
    excess: dict[str, int]
    """Bytes above the limit, for each phase that does not fit."""
    remedies: tuple[str, ...] = ()
    """Command-line overrides making the recipe fit, cheapest first."""

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "fits": self.fits,
            "limit_bytes": self.limits,
            "excess_bytes": self.excess,
            "remedies": list(self.remedies),
        }

    @property
    def lines(self) -> list[str]:
        """Return the last lines printed by `megarl plan`: the verdict, and the cheapest change with which the recipe
        fits."""
        return [self.text, *(f"cheapest remedy: {remedy}" for remedy in self.remedies[:1])]


def verdict_without_gpus() -> Verdict:
    """Return the result of the check if the memory of the GPUs is unknown."""
    return Verdict(None, f"no verdict: the memory of the run's GPUs is unknown; {NAME_THE_GPU}", {}, {})


def refusal(recipe: Recipe, models: Models, gpus: GpuMemory, over: list[Phase]) -> str:
    """Return the error for a run too large for its GPUs: the phases above the limit, and up to three changes."""
    text = f"{_name_limits(recipe, gpus)}: {_name_excess(gpus, over)}"
    changes = _remedies(recipe, models, gpus)
    if changes.narrow:
        return f"{text}; what fits: {', or '.join(changes.narrow)}"
    if changes.wider is not None:
        return (
            f"{text}; no change of offload, recomputation, KV cache or row length is enough; what does: {changes.wider}"
        )
    return f"{text}; {_NOTHING}"


@dataclass(frozen=True, slots=True)
class _Remedies:
    narrow: tuple[str, ...]
    """Changes that leave parallel sizes and nodes as they are, cheapest first."""
    wider: str | None = None
    """A change of parallel sizes or nodes. It is searched only if no change in `narrow` is enough."""

    @property
    def all(self) -> tuple[str, ...]:
        return self.narrow or ((self.wider,) if self.wider is not None else ())


def _remedies(recipe: Recipe, models: Models, gpus: GpuMemory) -> _Remedies:
    # Changes on the same ranks cost nothing but speed, so they are tried before more ranks.
    if fitting := remedies(recipe, models, gpus):
        return _Remedies(tuple(" ".join(remedy.overrides) for remedy in fitting))
    return _Remedies((), _find_wider(recipe, gpus))


def verdict_on_gpus(recipe: Recipe, models: Models, table: MemoryTable, gpus: GpuMemory) -> Verdict:
    """Return whether a prediction for GPUs fits. Each phase is compared with the memory of the GPU running it."""
    limits = {phase.name: int(gpus.gib_for(phase) * _GIB) for phase in table.phases}
    over = gpus.overfull_phases(table)
    excess = {phase.name: phase.device_bytes - limits[phase.name] for phase in over}
    if over:
        text = f"does not fit: {_name_limits(recipe, gpus)}: {_name_excess(gpus, over)}"
        changes = _remedies(recipe, models, gpus).all
        return Verdict(False, text if changes else f"{text}; {_NOTHING}", limits, excess, changes)
    if (text := _too_long_request(table)) is not None:
        changes = _cache_remedies(recipe, models, gpus)
        return Verdict(False, f"does not fit: {text if changes else f'{text}; {_NOTHING}'}", limits, excess, changes)
    tightest = min(table.phases, key=lambda phase: limits[phase.name] - phase.device_bytes)
    needed, limit = tightest.device_bytes / _GIB, gpus.gib_for(tightest)
    text = (
        f"fits: {_name_limits(recipe, gpus)}: {tightest.name} takes the most, {needed:.1f} of {limit:.1f} GiB; "
        f"{limit - needed:.1f} GiB are left"
    )
    return Verdict(True, text, limits, excess)


def _too_long_request(table: MemoryTable) -> str | None:
    """Return an error text if the KV cache cannot hold the longest possible request. None: it can, or there is no
    engine."""
    if table.cache is None or table.cache.longest_requests:
        return None
    return (
        f"the longest possible request has {table.cache.longest:,} tokens, but the KV cache holds "
        f"{table.cache.tokens:,}"
    )


def _cache_remedies(recipe: Recipe, models: Models, gpus: GpuMemory) -> tuple[str, ...]:
    """Return overrides enlarging the KV cache until it holds the longest possible request."""
    if (share := recipe.rollout.gpu_memory_utilization) is not None:
        return _larger_share(recipe, models, gpus, share)
    field = "rollout.kv_cache_gib"
    if _fits_on_gpus(with_field_values(recipe, {field: default_cache_gib(recipe, models, gpus)}), models, gpus):
        return (f"{field}=default",)
    # The least cache does not fit next to the other memory, so it needs a further change.
    least = least_cache_gib(recipe, models.policy.shape)
    further = remedies(with_field_values(recipe, {field: least}), models, gpus)
    return tuple(f"{field}={least:g} {' '.join(remedy.overrides)}" for remedy in further)


def _larger_share(recipe: Recipe, models: Models, gpus: GpuMemory, present: float) -> tuple[str, ...]:
    """Return the smallest rollout.gpu_memory_utilization, in hundredths, with which the KV cache holds a longest
    request."""
    field = "rollout.gpu_memory_utilization"
    shares = [percent / 100 for percent in range(1, 101) if percent / 100 > present]
    fitting = (share for share in shares if _fits_on_gpus(with_field_values(recipe, {field: share}), models, gpus))
    return tuple(f"{field}={share:g}" for share in islice(fitting, 1))


def _fits_on_gpus(recipe: Recipe, models: Models, gpus: GpuMemory) -> bool:
    table = memory_table(recipe, models, GPU, gpu_gib=gpus.engine)
    return not gpus.overfull_phases(table) and _too_long_request(table) is None


def verdict_on_cpus(recipe: Recipe, models: Models, table: MemoryTable) -> Verdict:
    """Return whether a prediction for CPUs fits: the sum of the maxima of a node's ranks is compared with this
    machine's memory."""
    needed, limit = fullest_node_bytes(recipe, table), machine_bytes()
    phases = " and ".join(phase.name for phase in table.fullest_host)
    text = f"the ranks take {needed / _GIB:.1f} GiB of host memory in {phases}, this machine has {limit / _GIB:.1f}"
    limits = {phase.name: limit for phase in table.phases}
    if needed <= limit and (too_long := _too_long_request(table)) is not None:
        changes = _cache_remedies_on_cpus(recipe, models)
        too_long = too_long if changes else f"{too_long}; {_NOTHING_ON_CPUS}"
        return Verdict(False, f"does not fit on CPUs: {too_long}", limits, {}, changes)
    if needed <= limit:
        return Verdict(True, f"fits on CPUs: {text}", limits, {})
    excess = {phase.name: needed - limit for phase in table.fullest_host}
    text = f"does not fit on CPUs: {text}; for GPUs {NAME_THE_GPU}"
    return Verdict(False, text, limits, excess)


def _cache_remedies_on_cpus(recipe: Recipe, models: Models) -> tuple[str, ...]:
    """Return the override for the smallest sufficient KV cache on CPUs. None: the ranks would then exceed the
    memory."""
    values = {"rollout.kv_cache_gib": least_cache_gib(recipe, models.policy.shape)}
    with_cache = with_field_values(recipe, values)
    remedy = Remedy(values, memory_table(with_cache, models, CPU))
    fits = fullest_node_bytes(with_cache, remedy.table) <= machine_bytes()
    return (" ".join(remedy.overrides),) if fits and _too_long_request(remedy.table) is None else ()


def _name_limits(recipe: Recipe, gpus: GpuMemory) -> str:
    """Return the source of the GPU memory for a message: recipe fields, or this machine."""
    named, engines = recipe.cluster.gpu_memory_gib, recipe.cluster.groups.engines
    text = f"cluster.gpu_memory_gib = {named if named is not None else f'{gpus.trainer:.1f} (of this machine)'}"
    if engines is not None and engines.gpu_memory_gib is not None:
        text += f", cluster.groups.engines.gpu_memory_gib = {engines.gpu_memory_gib}"
    return text


def _name_excess(gpus: GpuMemory, over: list[Phase]) -> str:
    """Return the phases above the limit, largest first: the excess in GiB, and what takes most of the memory."""
    return "; ".join(
        f"{phase.name} takes {phase.device_bytes / _GIB:.1f} GiB on {phase.place}, "
        f"{phase.device_bytes / _GIB - gpus.gib_for(phase):.1f} too much ({_largest(phase)})"
        for phase in sorted(over, key=lambda phase: -phase.device_bytes)
    )


def _largest(phase: Phase) -> str:
    """Return the three uses (weights, gradients, ...) taking most memory in a phase, in words."""
    kinds = sorted(phase.uses, key=lambda use: -use.device_bytes)[:3]
    return ", ".join(f"{use.kind} {use.device_bytes / _GIB:.1f}" for use in kinds)


def _find_wider(recipe: Recipe, gpus: GpuMemory) -> str | None:
    """Return a doubled parallel size or number of nodes making the recipe fit, with one more change if needed."""
    trainer, cluster = recipe.trainer, recipe.cluster
    engines = ({"rollout.tp": 2 * recipe.rollout.tp},) if recipe.separate_ranks else ()
    # Ordered by cost: engines first, then trainer sizes on the same nodes, then more nodes.
    for values in (
        *engines,
        {"trainer.tp": 2 * trainer.tp},
        {"trainer.pp": 2 * trainer.pp},
        {"cluster.nodes": 2 * cluster.nodes},
        {"trainer.tp": 2 * trainer.tp, "cluster.nodes": 2 * cluster.nodes},
        {"trainer.pp": 2 * trainer.pp, "cluster.nodes": 2 * cluster.nodes},
    ):
        wider = with_field_values(recipe, values if recipe.trainer.dp is None else {**values, "trainer.dp": None})
        parallel = sizes.parallel_of(wider)
        models = models_of(wider, parallel)
        if any(
            (
                *sizes.ranks(wider),
                *sizes.batches(wider, parallel.dp),
                *model_sizes.model_fit(wider, models.policy.shape),
            )
        ):
            continue
        table = memory_table(wider, models, GPU, gpu_gib=gpus.engine)
        remedy = Remedy(values, table)
        if not gpus.overfull_phases(table):
            return " ".join(remedy.overrides)
        if further := remedies(wider, models, gpus, max_remedies=1):
            return " ".join((*remedy.overrides, *further[0].overrides))
    return None


_SAME_GPU = 0.95
"""Fraction of a GPU kind's nominal memory from which an installed GPU counts as this kind."""


def gpu_gib(recipe: Recipe) -> float | None:
    """Return the memory of the run's GPUs in GiB, or None if it is unknown."""
    memory = recipe.cluster.gpu_memory_gib
    if memory is None:
        return installed_gpu_gib() if uses_this_machine(recipe) else None
    return GPU_MEMORY_GIB[memory] if isinstance(memory, str) else memory


def gpu_kind(recipe: Recipe) -> str | None:
    """Return the kind of the trainer's GPUs, for example h200: from the recipe, else from this machine. None:
    unknown."""
    if isinstance(named_kind := recipe.cluster.gpu_memory_gib, str):
        return named_kind
    names = [gpu.name.lower() for gpu in installed_gpus()] if uses_this_machine(recipe) else []
    return next((kind for kind in GPU_MEMORY_GIB if any(kind in name for name in names)), None)


def gpu_memory(recipe: Recipe) -> GpuMemory | None:
    """Return the memory of the trainer's and of the engines' GPUs. None: the trainer's is unknown."""
    if (gib := gpu_gib(recipe)) is None:
        return None
    engines = recipe.cluster.groups.engines
    engine = None if engines is None else engines.gpu_memory_gib
    if isinstance(engine, str):
        engine = GPU_MEMORY_GIB[engine]
    return GpuMemory(trainer=gib, engine=gib if engine is None else engine)


def ranks_on_cpu(recipe: Recipe) -> bool:
    """Return whether ranks started in this environment run on CPUs."""
    return runs_on_cpu() or recipe.cluster.device == "cpu"


def uses_this_machine(recipe: Recipe) -> bool:
    """Return whether the run uses this machine's GPUs. On a login node it does not."""
    # Slurm sets SLURMD_NODENAME on a job's nodes only.
    return not ranks_on_cpu(recipe) and (recipe.cluster.launcher == "local" or "SLURMD_NODENAME" in os.environ)


def table_of(recipe: Recipe, parallel: ParallelConfig) -> MemoryTable:
    """Return a recipe's predicted memory by phase, for GPUs if the recipe or this environment has any, else for
    CPUs."""
    gpus = gpu_memory(recipe)
    is_gpu = gpus is not None or not ranks_on_cpu(recipe)
    return memory_table(recipe, models_of(recipe, parallel), GPU if is_gpu else CPU, gpu_gib=gpus and gpus.engine)


def verdict_of(recipe: Recipe, parallel: ParallelConfig, table: MemoryTable) -> Verdict:
    """Return whether a recipe's predicted memory fits into the GPUs of the recipe or the machine, or into this
    machine's memory if ranks run on CPUs."""
    if (gpus := gpu_memory(recipe)) is not None:
        return verdict_on_gpus(recipe, models_of(recipe, parallel), table, gpus)
    if table.is_gpu or recipe.cluster.launcher != "local" or recipe.cluster.nodes > 1:
        return verdict_without_gpus()
    return verdict_on_cpus(recipe, models_of(recipe, parallel), table)


def predicted_memory(recipe: Recipe) -> dict[str, int]:
    """Return the predicted bytes of the rank with most memory, keyed by the phases in the metrics memory/PHASE_gib."""
    return _table_here(recipe).bytes_by_metric()


def planned_host_bytes(recipe: Recipe) -> RankHostBytes | None:
    """Return the predicted bytes of host memory of one rank on GPUs, keyed by the kind of rank (trainer, engine).

    None: the recipe cannot be planned, or its ranks run on CPUs, which `resource_warnings` covers.
    """
    if ranks_on_cpu(recipe) or any(sizes.ranks(recipe)):
        return None
    try:
        models = models_of(recipe, sizes.parallel_of(recipe))
    except DataError:
        return None
    return None if any(model_sizes.model_fit(recipe, models.policy.shape)) else rank_host_bytes(_table_here(recipe))


def platform_here(recipe: Recipe) -> Platform:
    """Return the device of the recipe's ranks if they start on this kind of machine."""
    return CPU if ranks_on_cpu(recipe) else GPU


def _table_here(recipe: Recipe) -> MemoryTable:
    """Return a recipe's predicted memory by phase, for ranks on this machine's kind of device."""
    platform = platform_here(recipe)
    models = models_of(recipe, sizes.parallel_of(recipe))
    gpus = gpu_memory(recipe)
    return memory_table(recipe, models, platform, gpu_gib=gpus and gpus.engine)


def memory_faults(recipe: Recipe, parallel: ParallelConfig, *, is_start: bool) -> Iterator[str]:
    """Yield an error if phases need more than a GPU's memory, with the cheapest changes that fit."""
    if recipe.rollout.gpu_memory_utilization is not None and recipe.has_engine:
        yield from _utilization(recipe)
    yield from _other_gpu(recipe, is_start)
    if (gpus := gpu_memory(recipe)) is None:
        return
    try:
        models = models_of(recipe, parallel)
    except DataError:
        return  # The checks of the model folder report it.
    table = memory_table(recipe, models, GPU, gpu_gib=gpus.engine)
    if over := gpus.overfull_phases(table):
        yield refusal(recipe, models, gpus, over)
    # Under gpu_memory_utilization the cache takes the remainder, so it is the cache that may be too small.
    elif table.cache is not None and not table.cache.longest_requests:
        yield (
            f"rollout.gpu_memory_utilization = {recipe.rollout.gpu_memory_utilization}: leaves a KV cache of "
            f"{table.cache.tokens} tokens, but one request has up to {table.cache.longest}; raise it"
        )


def _utilization(recipe: Recipe) -> Iterator[str]:
    if gpu_gib(recipe) is None and runs_on_cpu():
        yield (
            f"rollout.gpu_memory_utilization = {recipe.rollout.gpu_memory_utilization}: the ranks run on CPUs, which "
            "have no GPU memory; set rollout.kv_cache_gib instead"
        )


def _other_gpu(recipe: Recipe, is_start: bool) -> Iterator[str]:
    """Yield an error if this machine's GPUs have less memory than cluster.gpu_memory_gib."""
    if not is_start or recipe.cluster.launcher != "local" or not uses_this_machine(recipe):
        return
    expected_gib, installed_gib = gpu_gib(recipe), installed_gpu_gib()
    if expected_gib is not None and installed_gib is not None and installed_gib < _SAME_GPU * expected_gib:
        yield (
            f"cluster.gpu_memory_gib = {recipe.cluster.gpu_memory_gib}: this machine's GPUs have only "
            f"{installed_gib:.1f} GiB; leave it out, or run on GPUs with this memory"
        )
