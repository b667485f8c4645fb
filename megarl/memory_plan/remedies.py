"""Search for changes of a recipe that make its run fit into GPU memory. Each change is checked by predicting the memory
again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from megarl.config import Recipe
from megarl.config.optimizer_on_host import obstacles
from megarl.config.override_text import short_override
from megarl.config.parallel import FP8_BLOCK
from megarl.families.shape import ModelShape
from megarl.memory_plan.devices import GPU, GpuMemory
from megarl.memory_plan.memory_table import MemoryTable
from megarl.memory_plan.models import Models
from megarl.memory_plan.phases import memory_table
from megarl.memory_plan.savings import in_written_order, offloads

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
"""Costs of changes, to try cheap ones first. Numbers have no unit. Offloading costs seconds per step. A smaller KV
cache, shorter rows and recomputation (a third of the training time) cost more. An optimizer on the host costs most.
"""
_GIB = 2**30
_LONGEST_FORWARD = 8
"""Greatest row length of a pass without gradients, in row lengths of an update. Longer rows save no more time, and
fewer rows are harder to balance over ranks."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """New values of recipe fields that make the run fit into memory, and the memory predicted with them."""

    values: Mapping[str, Any]
    table: MemoryTable

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return the new values as command-line overrides."""
        return tuple(short_override(field, value) for field, value in self.values.items())


def remedies(recipe: Recipe, models: Models, gpus: GpuMemory, *, max_remedies: int = 3) -> list[Remedy]:
    """Return the cheapest changes with which the recipe fits: of offload, KV cache, overlap, row length, recomputation.

    Each is enough by itself, and none of its fields can be left out. If none fits, the search is repeated with the
    optimizer on the host.
    """
    if fitting := _remedies(recipe, models, gpus, max_remedies):
        return fitting
    if (on_host := _optimizer_on_host(recipe)) is None:
        return []
    recipe_on_host = with_field_values(recipe, on_host)
    if (remedy := _fit_values(recipe, models, gpus, on_host)) is not None:
        return [remedy]
    further = _remedies(recipe_on_host, models, gpus, max_remedies)
    return [Remedy(on_host | {**remedy.values}, remedy.table) for remedy in further]


def _optimizer_on_host(recipe: Recipe) -> dict[str, Any] | None:
    """Return the field values that move the optimizer to the host. None: this is impossible, or the optimizer is there
    already."""
    trainer = recipe.trainer
    if any(obstacles(recipe)) or trainer.optimizer_offload_fraction == 1:
        return None
    fields: dict[str, Any] = {"trainer.optimizer_offload_fraction": 1.0}
    # An optimizer on the host has no states left to offload, and the recipe check rejects both together.
    if "optimizer" in trainer.offload:
        fields["trainer.offload"] = tuple(name for name in trainer.offload if name != "optimizer")
    return fields


def _remedies(recipe: Recipe, models: Models, gpus: GpuMemory, max_remedies: int) -> list[Remedy]:
    priced_remedies: list[tuple[float, Remedy]] = []
    for values in _choices(recipe, models.policy.shape):
        # Choices come with few fields first. A choice with all fields of a remedy already found changes more than
        # needed.
        if any(set(remedy.values) <= set(values) for _, remedy in priced_remedies):
            continue
        if (remedy := _fit_values(recipe, models, gpus, values)) is not None:
            priced_remedies.append((_cost(recipe, remedy.values), remedy))
    needed = [
        (cost, remedy)
        for cost, remedy in priced_remedies
        if not any(set(smaller.values) < set(remedy.values) for _, smaller in priced_remedies)
    ]
    return [remedy for _, remedy in sorted(needed, key=lambda pair: pair[0])[:max_remedies]]


def with_field_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return a copy of the recipe with new values of some fields, keyed by dotted name."""
    # One copy for each section: a search of layouts makes thousands of recipes.
    sections: dict[str, dict[str, Any]] = {}
    for field, value in values.items():
        section, _, name = field.partition(".")
        sections.setdefault(section, {})[name] = value
    copies = {
        section: getattr(recipe, section).model_copy(update=section_values)
        for section, section_values in sections.items()
    }
    return recipe.model_copy(update=copies)


class _Fitted:
    """Placeholder for a field's value. The search replaces it by the largest value that fits."""


_FITTED = _Fitted()


def _choices(recipe: Recipe, shape: ModelShape) -> Iterator[dict[str, Any]]:
    """Yield the changes to try, those with few fields first."""
    trainer = recipe.trainer
    have = set(trainer.offload)
    more_states = [in_written_order({*have, *states}) for states in offloads(recipe) if not set(states) <= have]
    offload: list[Any] = [None, *dict.fromkeys(more_states)]
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
    # Recomputed layers would choose their experts again, so router replay must be off.
    together = {"trainer.router_replay": False} if trainer.router_replay else {}
    choices = [
        {field: value for field, value in zip(fields, values, strict=True) if value is not None}
        | (together if values[-1] == "full" else {})
        for values in product(offload, cache, overlap, rows, recompute)
    ]
    yield from sorted(filter(None, choices), key=len)


def _recomputation(recipe: Recipe, shape: ModelShape) -> tuple[str, Any]:
    """Return the field and the value that recompute more activations. None: everything is recomputed already."""
    trainer = recipe.trainer
    if trainer.recompute == "full":
        return "trainer.recompute", None
    if "recompute_modules" not in trainer.model_fields_set:
        return "trainer.recompute", "full"
    # The recipe check rejects `full` together with a list of modules, so extend the list.
    module = "mlp" if not shape.num_experts else "moe_act" if trainer.router_replay else "moe"
    more = (*trainer.recompute_modules, module)
    return "trainer.recompute_modules", None if module in trainer.recompute_modules else more


def _fit_values(recipe: Recipe, models: Models, gpus: GpuMemory, values: dict[str, Any]) -> Remedy | None:
    """Return a change of fields, with the largest values that fit in place of `_FITTED`. None: nothing fits."""
    fixed_values = {field: value for field, value in values.items() if value is not _FITTED}
    # Each fit starts from the values fixed before, so later fields use only the memory still missing.
    for field in values.keys() - fixed_values.keys():
        fit = _fit_rows if field == "trainer.max_tokens_per_microbatch" else _fit_cache
        if (value := fit(with_field_values(recipe, fixed_values), models, gpus)) is None:
            return None
        fixed_values[field] = value
    ordered = {field: fixed_values[field] for field in values}
    table = memory_table(with_field_values(recipe, ordered), models, GPU, gpu_gib=gpus.engine)
    return Remedy(ordered, table) if not gpus.overfull_phases(table) else None


def cache_within(table: MemoryTable, limit_gib: float) -> float:
    """Return the size in GiB, rounded down to tenths, of the largest KV cache for which engine ranks need at most
    `limit_gib`.

    It is negative if no cache fits.
    """
    sampling = [phase for phase in table.phases if phase.use("KV cache").device_bytes]
    without_cache = max((phase.device_bytes - phase.use("KV cache").device_bytes for phase in sampling), default=0)
    return math.floor((limit_gib - without_cache / _GIB) * 10) / 10


def _fit_cache(recipe: Recipe, models: Models, gpus: GpuMemory) -> float | None:
    """Return the largest value of `rollout.kv_cache_gib` (or `rollout.gpu_memory_utilization`) that fits during
    sampling. None: no value fits."""
    table = memory_table(recipe, models, GPU, gpu_gib=gpus.engine)
    sampling = [phase.device_bytes for phase in table.phases if phase.use("KV cache").device_bytes]
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
    # A cache too small for one longest request is useless.
    capacity = memory_table(with_field_values(recipe, {field: value}), models, GPU, gpu_gib=gpus.engine).cache
    return value if capacity is not None and capacity.longest_requests >= 1 else None


def _fit_rows(recipe: Recipe, models: Models, gpus: GpuMemory) -> int | None:
    """Return the greatest row length, below the present one, with which training fits. None: it could not hold a
    sample."""
    multiple = _row_step(recipe, models)
    low = -(-(recipe.trained_tokens + bool(recipe.reward.model)) // multiple)
    high = (recipe.trainer.max_tokens_per_microbatch - 1) // multiple

    def fits(count: int) -> bool:
        shorter = with_field_values(recipe, {"trainer.max_tokens_per_microbatch": count * multiple})
        training, scoring = _pass_bytes(shorter, models, gpus)
        return max(training, scoring) <= gpus.trainer * _GIB

    if low > high or not fits(low):
        return None
    return _greatest(fits, low=low, high=high) * multiple


def forward_row_tokens(recipe: Recipe, models: Models, gpus: GpuMemory) -> int | None:
    """Return the greatest row length at which a pass without gradients needs no more memory than an update.

    None: rows stay as long as those of an update. This happens if no longer row fits, without such passes, and with
    pipeline stages. Longer rows are fewer rows, which leave pipeline stages idle.
    """
    if models.policy.parallel.pp > 1:
        return None
    multiple = _row_step(recipe, models)
    shortest = recipe.trainer.max_tokens_per_microbatch
    training, scoring = _pass_bytes(recipe, models, gpus)
    if not scoring:
        return None

    def fits(count: int) -> bool:
        longer = with_field_values(recipe, {"trainer.max_tokens_per_forward": count * multiple})
        return _pass_bytes(longer, models, gpus)[1] <= training

    low, high = -(-shortest // multiple), _LONGEST_FORWARD * shortest // multiple
    if low > high or not fits(low):
        return None
    row_tokens = _greatest(fits, low=low, high=high) * multiple
    return row_tokens if row_tokens > shortest else None


def _row_step(recipe: Recipe, models: Models) -> int:
    """Return the number of tokens of which a row length is a multiple."""
    parallel = models.policy.parallel
    multiple = parallel.sequence_multiple * (parallel.tp if recipe.trainer.sequence_parallel is not False else 1)
    # Under FP8 each part of a row consists of whole blocks, as in `preflight.sizes.row_multiple`.
    return multiple * FP8_BLOCK if recipe.trainer.fp8 == "blockwise" else math.lcm(multiple, 128)


def _pass_bytes(recipe: Recipe, models: Models, gpus: GpuMemory) -> tuple[int, int]:
    """Return the bytes on a device in the fullest phase with gradients, and in the fullest one without (0: none)."""
    phases = memory_table(recipe, models, GPU, gpu_gib=gpus.engine).phases
    training = (phase.device_bytes for phase in phases if phase.metric == "train")
    scoring = (phase.device_bytes for phase in phases if phase.metric == "logprobs")
    return max(training), max(scoring, default=0)


def _greatest(fits: Callable[[int], bool], *, low: int, high: int) -> int:
    """Return the greatest number of `low` to `high` that `fits`. `low` does, and memory grows with the number."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _cost(recipe: Recipe, values: Mapping[str, Any]) -> float:
    """Return the total cost of a change. A smaller cache or row length costs more, the more it loses."""
    total = 0.0
    for field, value in values.items():
        total += _COSTS[field]
        if field == "trainer.offload":
            # Each further offloaded state adds transfer time to every step.
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
