"""Changes of a recipe that make it fit into a GPU's memory, each computed by the table of the changed recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from megarl.config import Recipe
from megarl.config.optimizer_on_host import obstacles
from megarl.config.parallel import FP8_BLOCK
from megarl.families.shape import ModelShape
from megarl.memory.devices import GPU, GpuMemory
from megarl.memory.models import Models
from megarl.memory.phases import memory_table
from megarl.memory.table import MemoryTable

_OFFLOADED = ("optimizer", "gradients", "parameters")
"""States that may be offloaded, cheapest first."""
_COSTS = {
    "trainer.offload": 1.0,
    "rollout.kv_cache_gib": 2.0,
    "rollout.gpu_memory_utilization": 2.0,
    "trainer.max_tokens_per_microbatch": 3.0,
    "trainer.recompute": 4.0,
    "trainer.recompute_modules": 2.5,
    "trainer.router_replay": 4.0,
    "weights.overlap": 0.5,
    "trainer.optimizer_offload_fraction": 6.0,
}
"""Cost of a change to a run, in no unit: seconds of each step, cache, shorter rows, a third of the training time.

An optimizer that works on the host takes longer than all of them.
"""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Remedy:
    """Fields with values under which a recipe fits, and the changed recipe's table."""

    values: Mapping[str, Any]
    table: MemoryTable

    @property
    def overrides(self) -> tuple[str, ...]:
        """As they are given on the command line."""
        return tuple(f"{field}={_written(value)}" for field, value in self.values.items())


def remedies(recipe: Recipe, models: Models, gpus: GpuMemory, *, most: int = 3) -> list[Remedy]:
    """The cheapest changes of offload, KV cache, overlap, row length and recomputation under which the recipe fits.

    Each fits by itself, and no field of it could be left out. Where none fits, the same with the optimizer on the host.
    """
    if fitting := _remedies(recipe, models, gpus, most):
        return fitting
    if (on_host := _optimizer_on_host(recipe)) is None:
        return []
    other = changed(recipe, on_host)
    if (remedy := _completed(recipe, models, gpus, on_host)) is not None:
        return [remedy]
    further = _remedies(other, models, gpus, most)
    return [Remedy(on_host | {**remedy.values}, remedy.table) for remedy in further]


def _optimizer_on_host(recipe: Recipe) -> dict[str, Any] | None:
    """Fields under which the optimizer works on the host; None where it cannot, or does already."""
    trainer = recipe.trainer
    if any(obstacles(recipe)) or trainer.optimizer_offload_fraction == 1:
        return None
    fields: dict[str, Any] = {"trainer.optimizer_offload_fraction": 1.0}
    if "optimizer" in trainer.offload:
        fields["trainer.offload"] = tuple(name for name in trainer.offload if name != "optimizer")
    return fields


def _remedies(recipe: Recipe, models: Models, gpus: GpuMemory, most: int) -> list[Remedy]:
    found: list[tuple[float, Remedy]] = []
    for values in _choices(recipe, models.policy.shape):
        if any(set(remedy.values) <= set(values) for _, remedy in found):
            continue
        if (remedy := _completed(recipe, models, gpus, values)) is not None:
            found.append((_cost(recipe, remedy.values), remedy))
    needed = [
        (cost, remedy)
        for cost, remedy in found
        if not any(set(other.values) < set(remedy.values) for _, other in found)
    ]
    return [remedy for _, remedy in sorted(needed, key=lambda pair: pair[0])[:most]]


def changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with other values of some fields, by their dotted names."""
    for field, value in values.items():
        section, _, name = field.partition(".")
        own = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: own})
    return recipe


class _Fitted:
    """A value that is to be chosen as large as fits."""


_FITTED = _Fitted()


def _choices(recipe: Recipe, shape: ModelShape) -> Iterator[dict[str, Any]]:
    """Changes to try, few fields before many."""
    trainer = recipe.trainer
    offload: list[Any] = [None]
    if recipe.has_engine and (not recipe.separate_ranks or recipe.has_critic):
        have = set(trainer.offload)
        # What is on the host already is not taken there.
        states = _OFFLOADED[1:] if trainer.optimizer_offload_fraction else _OFFLOADED
        offload += [
            tuple(name for name in _OFFLOADED if name in have or name in states[:number])
            for number in range(1, len(states) + 1)
            if not set(states[:number]) <= have
        ]
    cache: list[Any] = [None, _FITTED] if recipe.has_engine else [None]
    rows: list[Any] = [None, _FITTED] if recipe.is_on_policy else [None]
    overlap: list[Any] = [None, False] if recipe.weights.overlap and recipe.separate_ranks else [None]
    recomputing, more = _recomputation(recipe, shape)
    recompute: list[Any] = [None] if more is None else [None, more]
    utilization = recipe.rollout.gpu_memory_utilization is not None
    fields = (
        "trainer.offload",
        "rollout.gpu_memory_utilization" if utilization else "rollout.kv_cache_gib",
        "weights.overlap",
        "trainer.max_tokens_per_microbatch",
        recomputing,
    )
    # Layers that are computed anew would choose their experts anew.
    together = {"trainer.router_replay": False} if trainer.router_replay else {}
    choices = [
        {field: value for field, value in zip(fields, values, strict=True) if value is not None}
        | (together if values[-1] == "full" else {})
        for values in product(offload, cache, overlap, rows, recompute)
    ]
    yield from sorted(filter(None, choices), key=len)


def _recomputation(recipe: Recipe, shape: ModelShape) -> tuple[str, Any]:
    """The field by which more of a layer is computed anew, with its value; None: all is already."""
    trainer = recipe.trainer
    if trainer.recompute == "full":
        return "trainer.recompute", None
    if "recompute_modules" not in trainer.model_fields_set:
        return "trainer.recompute", "full"
    # Beside `full` the recipe's list is refused.
    module = "mlp" if not shape.num_experts else "moe_act" if trainer.router_replay else "moe"
    more = (*trainer.recompute_modules, module)
    return "trainer.recompute_modules", None if module in trainer.recompute_modules else more


def _completed(recipe: Recipe, models: Models, gpus: GpuMemory, values: dict[str, Any]) -> Remedy | None:
    """The change with its fitted values, if there are such."""
    given = {field: value for field, value in values.items() if value is not _FITTED}
    for field in values.keys() - given.keys():
        fit = _fitted_rows if field == "trainer.max_tokens_per_microbatch" else _fitted_cache
        if (value := fit(changed(recipe, given), models, gpus)) is None:
            return None
        given[field] = value
    ordered = {field: given[field] for field in values}
    table = memory_table(changed(recipe, ordered), models, GPU, gpu_gib=gpus.engine)
    return Remedy(ordered, table) if not gpus.exceeded(table) else None


def cache_within(table: MemoryTable, limit_gib: float) -> float:
    """GiB of the largest KV cache with which an engine takes `limit_gib` at most; tenths, negative if none fits."""
    sampling = [phase for phase in table.phases if phase.of("KV cache").device_bytes]
    others = max((phase.device_bytes - phase.of("KV cache").device_bytes for phase in sampling), default=0)
    return math.floor((limit_gib - others / _GIB) * 10) / 10


def _fitted_cache(recipe: Recipe, models: Models, gpus: GpuMemory) -> float | None:
    """The largest KV cache, or share of the GPU, that fits beside the rest while the engine samples; None if none."""
    table = memory_table(recipe, models, GPU, gpu_gib=gpus.engine)
    sampling = [phase.device_bytes for phase in table.phases if phase.of("KV cache").device_bytes]
    excess = max(sampling, default=0) - gpus.engine * _GIB
    if excess <= 0:
        return None
    rollout = recipe.rollout
    if rollout.gpu_memory_utilization is not None:
        value = math.floor((rollout.gpu_memory_utilization - excess / (gpus.engine * _GIB)) * 100) / 100
        field = "rollout.gpu_memory_utilization"
    else:
        value = cache_within(table, gpus.engine)
        field = "rollout.kv_cache_gib"
    if value <= 0:
        return None
    room = memory_table(changed(recipe, {field: value}), models, GPU, gpu_gib=gpus.engine).cache
    return value if room is not None and room.longest_requests >= 1 else None


def _fitted_rows(recipe: Recipe, models: Models, gpus: GpuMemory) -> int | None:
    """The longest rows, shorter than they are, under which training fits; None where they could not hold a sample."""
    layout = models.policy.layout
    multiple = layout.sequence_multiple * (layout.tp if recipe.trainer.sequence_parallel is not False else 1)
    multiple = multiple * FP8_BLOCK if recipe.trainer.fp8 == "blockwise" else math.lcm(multiple, 128)
    least = -(-(recipe.trained_tokens + bool(recipe.reward.model)) // multiple)
    most = (recipe.trainer.max_tokens_per_microbatch - 1) // multiple

    def fits(count: int) -> bool:
        shorter = changed(recipe, {"trainer.max_tokens_per_microbatch": count * multiple})
        table = memory_table(shorter, models, GPU, gpu_gib=gpus.engine)
        training = [phase for phase in table.phases if phase.metric in ("train", "logprobs")]
        return max(phase.device_bytes for phase in training) <= gpus.trainer * _GIB

    if least > most or not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least * multiple


def _cost(recipe: Recipe, values: Mapping[str, Any]) -> float:
    """Cost of the changes together; of a cache and of rows by the share that is lost, too."""
    total = 0.0
    for field, value in values.items():
        total += _COSTS[field]
        if field == "trainer.offload":
            total += 0.5 * (len(value) - len(recipe.trainer.offload) - 1)
        elif field not in (
            "trainer.recompute",
            "trainer.recompute_modules",
            "trainer.router_replay",
            "weights.overlap",
        ):
            section, _, name = field.partition(".")
            total += 4 * (1 - value / getattr(getattr(recipe, section), name))
    return total


def _written(value: Any) -> str:
    return (
        f"[{','.join(value)}]" if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
    )
