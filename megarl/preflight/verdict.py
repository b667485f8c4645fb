"""The verdict on a recipe's memory: whether it fits, the excess by phase, and remedies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from megarl.config import Recipe
from megarl.memory_plan.devices import CPU, GPU, GpuMemory
from megarl.memory_plan.memory_table import MemoryTable, Phase
from megarl.memory_plan.models import Models
from megarl.memory_plan.node_bytes import fullest_node
from megarl.memory_plan.phases import memory_table
from megarl.memory_plan.remedies import Remedy, changed, remedies
from megarl.platform.host_memory import machine_bytes
from megarl.preflight import sizes
from megarl.preflight.planned_models import models_of
from megarl.preflight.vllm_limits import default_cache_gib, least_cache_gib

_GIB = 2**30
_NOTHING = "nothing that is tried fits: take more GPUs, or a smaller model"
_NOTHING_ON_CPUS = "no larger KV cache fits: lower rollout.sampling.max_new_tokens, or take a smaller model"
NAME_THE_GPU = "set cluster.gpu_memory_gib to h100, h200, b200 or GiB"
"""Remedy of unknown GPUs, the end of a message."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of comparing a recipe's memory with the available memory. `text` says it in one line."""

    fits: bool | None
    """None: the available memory is unknown."""
    text: str
    limits: dict[str, int]
    """Bytes of a GPU by phase, or on CPUs of the whole host."""
    excess: dict[str, int]
    """Bytes above the limit by phase, only for phases that do not fit."""
    remedies: tuple[str, ...] = ()
    """Command-line overrides making the recipe fit, cheapest first."""

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "fits": self.fits,
            "limit_bytes": self.limits,
            "excess_bytes": self.excess,
            "remedies": list(self.remedies),
        }

    @property
    def lines(self) -> list[str]:
        """Return the last lines of `megarl plan`: the verdict, then the cheapest remedy."""
        return [self.text, *(f"cheapest remedy: {remedy}" for remedy in self.remedies[:1])]


def verdict_without_gpus() -> Verdict:
    """Return the verdict for unknown GPUs."""
    return Verdict(None, f"no verdict: nothing names the memory of the run's GPUs; {NAME_THE_GPU}", {}, {})


def refusal(recipe: Recipe, models: Models, gpus: GpuMemory, over: list[Phase]) -> str:
    """Return the error of a start that does not fit: too large phases and up to three remedies."""
    text = f"{_limits_named(recipe, gpus)}: {_excess_named(gpus, over)}"
    found = _remedies(recipe, models, gpus)
    if found.narrow:
        return f"{text}; what fits: {', or '.join(found.narrow)}"
    if found.wider is not None:
        return f"{text}; no offload, recomputation, cache or row length fits; what does: {found.wider}"
    return f"{text}; {_NOTHING}"


@dataclass(frozen=True, slots=True)
class _Remedies:
    narrow: tuple[str, ...]
    """Changes on the same ranks, cheapest first."""
    wider: str | None = None
    """Change of the parallel sizes or nodes. It is searched only if no narrow change fits."""

    @property
    def all(self) -> tuple[str, ...]:
        return self.narrow or ((self.wider,) if self.wider is not None else ())


def _remedies(recipe: Recipe, models: Models, gpus: GpuMemory) -> _Remedies:
    # Changes on the same ranks cost nothing but speed, so they are tried before more ranks.
    if found := remedies(recipe, models, gpus):
        return _Remedies(tuple(" ".join(remedy.overrides) for remedy in found))
    return _Remedies((), _wider(recipe, gpus))


def verdict_on_gpus(recipe: Recipe, models: Models, table: MemoryTable, gpus: GpuMemory) -> Verdict:
    """Return the verdict on a GPU table. Each phase is compared with the memory of its GPU."""
    limits = {phase.name: int(gpus.of(phase) * _GIB) for phase in table.phases}
    over = gpus.exceeded(table)
    excess = {phase.name: phase.device_bytes - limits[phase.name] for phase in over}
    if over:
        text = f"does not fit: {_limits_named(recipe, gpus)}: {_excess_named(gpus, over)}"
        found = _remedies(recipe, models, gpus).all
        return Verdict(False, text if found else f"{text}; {_NOTHING}", limits, excess, found)
    if (text := _too_long_request(table)) is not None:
        found = _cache_remedies(recipe, models, gpus)
        return Verdict(False, f"does not fit: {text if found else f'{text}; {_NOTHING}'}", limits, excess, found)
    tightest = min(table.phases, key=lambda phase: limits[phase.name] - phase.device_bytes)
    taken, limit = tightest.device_bytes / _GIB, gpus.of(tightest)
    text = (
        f"fits: {_limits_named(recipe, gpus)}: {tightest.name} takes the most, {taken:.1f} of {limit:.1f} GiB; "
        f"{limit - taken:.1f} GiB are left"
    )
    return Verdict(True, text, limits, excess)


def _too_long_request(table: MemoryTable) -> str | None:
    """Return what is wrong if the KV cache cannot hold one longest request. None: it can, or there is no engine."""
    if table.cache is None or table.cache.longest_requests:
        return None
    return f"one request may have {table.cache.longest:,} tokens, the KV cache holds {table.cache.tokens:,}"


def _cache_remedies(recipe: Recipe, models: Models, gpus: GpuMemory) -> tuple[str, ...]:
    """Return overrides enlarging the KV cache until one longest request fits."""
    if (share := recipe.rollout.gpu_memory_utilization) is not None:
        return _larger_share(recipe, models, gpus, share)
    field = "rollout.kv_cache_gib"
    if _fits_on_gpus(changed(recipe, {field: default_cache_gib(recipe, models, gpus)}), models, gpus):
        return (f"{field}=default",)
    # The least cache does not fit next to the other memory, so it needs a further change.
    least = least_cache_gib(recipe, models.policy.shape)
    further = remedies(changed(recipe, {field: least}), models, gpus)
    return tuple(f"{field}={least:g} {' '.join(remedy.overrides)}" for remedy in further)


def _larger_share(recipe: Recipe, models: Models, gpus: GpuMemory, present: float) -> tuple[str, ...]:
    """Return the least share of a GPU, in hundredths, for an engine that holds one longest request."""
    field = "rollout.gpu_memory_utilization"
    shares = [percent / 100 for percent in range(1, 101) if percent / 100 > present]
    fitting = (share for share in shares if _fits_on_gpus(changed(recipe, {field: share}), models, gpus))
    return tuple(f"{field}={share:g}" for share in islice(fitting, 1))


def _fits_on_gpus(recipe: Recipe, models: Models, gpus: GpuMemory) -> bool:
    table = memory_table(recipe, models, GPU, gpu_gib=gpus.engine)
    return not gpus.exceeded(table) and _too_long_request(table) is None


def verdict_on_cpus(recipe: Recipe, models: Models, table: MemoryTable) -> Verdict:
    """Return the verdict on a CPU table: all ranks of a node at their fullest, against this machine's memory."""
    needed, limit = table.host_bytes(*fullest_node(recipe, table)), machine_bytes()
    phases = " and ".join(phase.name for phase in table.fullest_host)
    text = f"the ranks take {needed / _GIB:.1f} GiB of host memory in {phases}, this machine has {limit / _GIB:.1f}"
    limits = {phase.name: limit for phase in table.phases}
    if needed <= limit and (too_long := _too_long_request(table)) is not None:
        found = _cache_remedies_on_cpus(recipe, models)
        too_long = too_long if found else f"{too_long}; {_NOTHING_ON_CPUS}"
        return Verdict(False, f"does not fit on CPUs: {too_long}", limits, {}, found)
    if needed <= limit:
        return Verdict(True, f"fits on CPUs: {text}", limits, {})
    excess = {phase.name: needed - limit for phase in table.fullest_host}
    text = f"does not fit on CPUs: {text}; for GPUs {NAME_THE_GPU}"
    return Verdict(False, text, limits, excess)


def _cache_remedies_on_cpus(recipe: Recipe, models: Models) -> tuple[str, ...]:
    """Return the override for the least KV cache that holds one longest request, if the ranks then fit."""
    values = {"rollout.kv_cache_gib": least_cache_gib(recipe, models.policy.shape)}
    other = changed(recipe, values)
    remedy = Remedy(values, memory_table(other, models, CPU))
    fits = remedy.table.host_bytes(*fullest_node(other, remedy.table)) <= machine_bytes()
    return (" ".join(remedy.overrides),) if fits and _too_long_request(remedy.table) is None else ()


def _limits_named(recipe: Recipe, gpus: GpuMemory) -> str:
    """Return the fields naming the memory of the GPUs, or this machine's memory."""
    named, engines = recipe.cluster.gpu_memory_gib, recipe.cluster.groups.engines
    given = f"cluster.gpu_memory_gib = {named if named is not None else f'{gpus.trainer:.1f} (of this machine)'}"
    if engines is not None and engines.gpu_memory_gib is not None:
        given += f", cluster.groups.engines.gpu_memory_gib = {engines.gpu_memory_gib}"
    return given


def _excess_named(gpus: GpuMemory, over: list[Phase]) -> str:
    """Return the too large phases, largest first, with the excess in GiB and the three largest kinds of use."""
    return "; ".join(
        f"{phase.name} takes {phase.device_bytes / _GIB:.1f} GiB on {phase.place}, "
        f"{phase.device_bytes / _GIB - gpus.of(phase):.1f} too much ({_largest(phase)})"
        for phase in sorted(over, key=lambda phase: -phase.device_bytes)
    )


def _largest(phase: Phase) -> str:
    """Return the three largest kinds of use."""
    kinds = sorted(phase.uses, key=lambda use: -use.device_bytes)[:3]
    return ", ".join(f"{use.kind} {use.device_bytes / _GIB:.1f}" for use in kinds)


def _wider(recipe: Recipe, gpus: GpuMemory) -> str | None:
    """Return a doubled parallel size or node count making the recipe fit, with the cheapest other change if needed."""
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
