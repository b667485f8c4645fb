"""Whether a recipe's predicted memory fits, and changes with which it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.config.reading.override_text import short_override
from megarl.planner.gpus_of_run import NAME_THE_GPU, gpu_memory
from megarl.planner.judge import MemoryJudge
from megarl.planner.memory.memory_table import MemoryTable, Phase
from megarl.planner.memory.models import Models
from megarl.planner.memory.node_bytes import fullest_node_bytes
from megarl.planner.predictions import models_of
from megarl.planner.remedies import (
    cache_remedies,
    cache_remedies_on_cpus,
    find_wider_remedy,
    holds_longest_request,
    remedies,
)
from megarl.platform.memory.host_memory import machine_bytes

_GIB = 2**30
_NOTHING = "none of the changes tried fits: use more GPUs, or a smaller model"
_NOTHING_ON_CPUS = "no larger KV cache fits: lower rollout.sampling.max_new_tokens, or use a smaller model"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A recipe's predicted memory compared with the available memory. `text` says the result in one line."""

    fits: bool | None
    """None: the available memory is unknown."""
    text: str
    limits: dict[str, int]
    """Available bytes by phase: of one GPU, or on CPUs of the whole host."""
    excess: dict[str, int]
    """Bytes above the limit, by phase that does not fit."""
    remedies: tuple[str, ...] = ()
    """Command-line overrides with which the recipe fits, cheapest first."""

    def as_json(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "limit_bytes": self.limits,
            "excess_bytes": self.excess,
            "remedies": list(self.remedies),
        }

    @property
    def lines(self) -> list[str]:
        return [self.text, *(f"cheapest remedy: {remedy}" for remedy in self.remedies[:1])]


def verdict_without_gpus() -> Verdict:
    return Verdict(None, f"no verdict: the memory of the run's GPUs is unknown; {NAME_THE_GPU}", {}, {})


def format_refusal(recipe: Recipe, judge: MemoryJudge, overfull_phases: Sequence[Phase]) -> str:
    """Return the error for a run that does not fit: phases above the memory limit, and changes that help."""
    text = f"{_name_limits(recipe, judge)}: {_name_excess(judge, overfull_phases)}"
    # Changes on the same ranks cost nothing but speed, so they are tried before more ranks.
    if changes := remedies(recipe, judge):
        return f"{text}; what fits: {', or '.join(map(_as_overrides, changes))}"
    if (wider_change := find_wider_remedy(recipe, judge)) is not None:
        return (
            f"{text}; no change of offload, recomputation, KV cache or row length is enough; larger sizes that fit: "
            f"{_as_overrides(wider_change)}"
        )
    return f"{text}; {_NOTHING}"


def _as_overrides(values: Mapping[str, Any]) -> str:
    return " ".join(short_override(field, value) for field, value in values.items())


def verdict_on_gpus(recipe: Recipe, judge: MemoryJudge, table: MemoryTable) -> Verdict:
    """Return whether a prediction for GPUs fits. Each phase is compared with the GPU of its rank."""
    limit_bytes = {phase.name: int(judge.gpus.gib_for(phase) * _GIB) for phase in table.phases}
    overfull_phases = judge.overfull_phases(table)
    excess_bytes = {phase.name: phase.device_bytes - limit_bytes[phase.name] for phase in overfull_phases}
    if overfull_phases:
        text = f"does not fit: {_name_limits(recipe, judge)}: {_name_excess(judge, overfull_phases)}"
        remedy_changes = remedies(recipe, judge)
        # Changes on the same ranks cost nothing but speed, so they are tried before more ranks.
        if not remedy_changes and (wider_change := find_wider_remedy(recipe, judge)) is not None:
            remedy_changes = [wider_change]
        text = text if remedy_changes else f"{text}; {_NOTHING}"
        return Verdict(False, text, limit_bytes, excess_bytes, tuple(map(_as_overrides, remedy_changes)))
    if (text := _too_long_request(table)) is not None:
        remedy_changes = cache_remedies(recipe, judge)
        text = f"does not fit: {text if remedy_changes else f'{text}; {_NOTHING}'}"
        return Verdict(False, text, limit_bytes, excess_bytes, tuple(map(_as_overrides, remedy_changes)))
    tightest = min(table.phases, key=lambda phase: limit_bytes[phase.name] - phase.device_bytes)
    needed_gib, limit_gib = tightest.device_bytes / _GIB, judge.gpus.gib_for(tightest)
    text = (
        f"fits: {_name_limits(recipe, judge)}: {tightest.name} takes the most, {needed_gib:.1f} of {limit_gib:.1f} "
        f"GiB; {limit_gib - needed_gib:.1f} GiB are left"
    )
    return Verdict(True, text, limit_bytes, excess_bytes)


def _too_long_request(table: MemoryTable) -> str | None:
    """Return an error if the KV cache cannot hold the longest possible request."""
    if table.cache is None or holds_longest_request(table):
        return None
    return (
        f"the longest possible request has {table.cache.longest:,} tokens, but the KV cache holds "
        f"{table.cache.tokens:,}"
    )


def verdict_on_cpus(recipe: Recipe, models: Models, table: MemoryTable) -> Verdict:
    """Return whether a prediction for CPUs fits: the sum over a node's ranks is compared with this machine's memory."""
    needed_bytes, limit_bytes = fullest_node_bytes(recipe, table), machine_bytes()
    phases = " and ".join(phase.name for phase in table.fullest_host)
    text = (
        f"the ranks take {needed_bytes / _GIB:.1f} GiB of host memory in {phases}, this machine has "
        f"{limit_bytes / _GIB:.1f}"
    )
    limits_by_phase = {phase.name: limit_bytes for phase in table.phases}
    if needed_bytes <= limit_bytes and (request_text := _too_long_request(table)) is not None:
        changes = tuple(map(_as_overrides, cache_remedies_on_cpus(recipe, models, limit_bytes)))
        request_text = request_text if changes else f"{request_text}; {_NOTHING_ON_CPUS}"
        return Verdict(False, f"does not fit on CPUs: {request_text}", limits_by_phase, {}, changes)
    if needed_bytes <= limit_bytes:
        return Verdict(True, f"fits on CPUs: {text}", limits_by_phase, {})
    excess_bytes = {phase.name: needed_bytes - limit_bytes for phase in table.fullest_host}
    text = f"does not fit on CPUs: {text}; for GPUs {NAME_THE_GPU}"
    return Verdict(False, text, limits_by_phase, excess_bytes)


def _name_limits(recipe: Recipe, judge: MemoryJudge) -> str:
    named_gib, engines = recipe.cluster.gpu_memory_gib, recipe.cluster.groups.engines
    gib_text = f"{judge.gpus.trainer:.1f} (of this machine)" if named_gib is None else named_gib
    text = f"cluster.gpu_memory_gib = {gib_text}"
    if engines is not None and engines.gpu_memory_gib is not None:
        text += f", cluster.groups.engines.gpu_memory_gib = {engines.gpu_memory_gib}"
    return text


def _name_excess(judge: MemoryJudge, overfull_phases: Sequence[Phase]) -> str:
    return "; ".join(
        f"{phase.name} takes {phase.device_bytes / _GIB:.1f} GiB on {phase.place}, "
        f"{phase.device_bytes / _GIB - judge.gpus.gib_for(phase):.1f} too much ({_largest(phase)})"
        for phase in sorted(overfull_phases, key=lambda phase: -phase.device_bytes)
    )


def _largest(phase: Phase) -> str:
    kinds = sorted(phase.uses, key=lambda use: -use.device_bytes)[:3]
    return ", ".join(f"{use.kind} {use.device_bytes / _GIB:.1f}" for use in kinds)


def verdict_of(recipe: Recipe, parallel: ParallelConfig, table: MemoryTable) -> Verdict:
    if (gpus := gpu_memory(recipe)) is not None:
        return verdict_on_gpus(recipe, MemoryJudge(models_of(recipe, parallel), gpus), table)
    if table.is_gpu or recipe.cluster.launcher != "local" or recipe.cluster.nodes > 1:
        return verdict_without_gpus()
    return verdict_on_cpus(recipe, models_of(recipe, parallel), table)
