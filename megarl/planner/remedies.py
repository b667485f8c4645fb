"""Changes of a recipe with which its run fits into GPU memory, cheapest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.config import Recipe
from megarl.config.optimizer_on_host import obstacles
from megarl.families.shape import ModelShape
from megarl.planner import model_sizes, sizes
from megarl.planner.cache import cache_within, default_cache_gib, least_cache_gib
from megarl.planner.judge import MemoryJudge
from megarl.planner.memory.devices import CPU
from megarl.planner.memory.memory_table import MemoryTable
from megarl.planner.memory.models import Models
from megarl.planner.memory.node_bytes import fullest_node_bytes
from megarl.planner.memory.phases import memory_table
from megarl.planner.predictions import models_of
from megarl.planner.rows import longest_row
from megarl.planner.savings import in_written_order, offloads
from megarl.planner.search import (
    Choice,
    Fitted,
    Move,
    iterate_in_order,
    list_choices,
    search,
    total_cost,
    with_field_values,
)

_GIB = 2**30
_CACHE, _SHARE = "rollout.kv_cache_gib", "rollout.gpu_memory_utilization"


def list_memory_moves(recipe: Recipe, judge: MemoryJudge) -> tuple[Move, ...]:
    """Return the changes that save GPU memory on the same ranks.

    Offloading costs seconds per step; a smaller KV cache, shorter rows and recomputation cost more.
    """
    trainer, rollout = recipe.trainer, recipe.rollout
    has_share = rollout.gpu_memory_utilization is not None
    lists_modules = "recompute_modules" in trainer.model_fields_set
    recomputes_all = trainer.recompute == "full"
    # Recomputed layers would choose their experts again, so router replay must be off.
    without_replay = {"trainer.router_replay": False} if trainer.router_replay else {}

    def fit_cache(changed: Recipe) -> float | None:
        return _largest_cache(changed, judge)

    return (
        Move(field="trainer.offload", values=_list_larger_offloads(recipe), cost=1.0, step=0.5),
        Move(
            field=_SHARE,
            values=({_SHARE: Fitted(fit_cache)},),
            cost=2.0,
            shrinks=True,
            condition=recipe.has_engine and has_share,
        ),
        Move(
            field=_CACHE,
            values=({_CACHE: Fitted(fit_cache)},),
            cost=2.0,
            shrinks=True,
            condition=recipe.has_engine and not has_share,
        ),
        Move(
            field="weights.overlap",
            values=({"weights.overlap": False},),
            cost=0.5,
            condition=recipe.weights.overlap and recipe.separate_ranks > 0,
        ),
        Move(
            field="trainer.max_tokens_per_microbatch",
            values=({"trainer.max_tokens_per_microbatch": Fitted(lambda changed: longest_row(changed, judge))},),
            cost=3.0,
            shrinks=True,
            condition=recipe.is_on_policy,
        ),
        Move(
            field="trainer.recompute",
            values=({"trainer.recompute": "full", **without_replay},),
            cost=8.0 if without_replay else 4.0,
            condition=not recomputes_all and not lists_modules,
        ),
        # The recipe check rejects `full` together with a list of modules, so extend the list.
        Move(
            field="trainer.recompute_modules",
            values=_list_more_modules(recipe, judge.models.policy.shape),
            cost=2.5,
            condition=not recomputes_all and lists_modules,
        ),
    )


def _list_larger_offloads(recipe: Recipe) -> list[dict[str, Any]]:
    present_states = set(recipe.trainer.offload)
    larger_offloads = (
        in_written_order({*present_states, *states}) for states in offloads(recipe) if not set(states) <= present_states
    )
    return [{"trainer.offload": states} for states in dict.fromkeys(larger_offloads)]


def _list_more_modules(recipe: Recipe, shape: ModelShape) -> list[dict[str, Any]]:
    trainer = recipe.trainer
    module = "mlp" if not shape.num_experts else "moe_act" if trainer.router_replay else "moe"
    modules = (*trainer.recompute_modules, module)
    return [] if module in trainer.recompute_modules else [{"trainer.recompute_modules": modules}]


def _largest_cache(recipe: Recipe, judge: MemoryJudge) -> float | None:
    """Return the largest KV cache that fits during sampling, in GiB or as a share of the GPU. None: none fits."""
    table = judge.predict(recipe)
    sampling_bytes = [phase.device_bytes for phase in table.phases if phase.use("KV cache").device_bytes]
    engine_gib = judge.gpus.engine
    excess_bytes = max(sampling_bytes, default=0) - engine_gib * _GIB
    if excess_bytes <= 0:
        return None
    if (gpu_share := recipe.rollout.gpu_memory_utilization) is not None:
        field, value = _SHARE, math.floor((gpu_share - excess_bytes / (engine_gib * _GIB)) * 100) / 100
    else:
        field, value = _CACHE, cache_within(table, engine_gib)
    if value <= 0:
        return None
    # A cache too small for one request of maximum length is useless.
    capacity = judge.predict(with_field_values(recipe, {field: value})).cache
    return value if capacity is not None and capacity.longest_requests >= 1 else None


def remedies(
    recipe: Recipe, judge: MemoryJudge, *, max_remedies: int = 3, required_values: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the cheapest changes with which the recipe fits into memory, cheapest first.

    A change has new values by field; all are needed, and each change is enough alone. `required_values` are set in any
    case. If no change is enough, the search is repeated with the optimizer on the host.
    """
    required_values = required_values or {}
    changed_recipe = with_field_values(recipe, required_values)
    optimizer_on_host = _optimizer_on_host(changed_recipe)
    for fixed_values in [{}, *([optimizer_on_host] if optimizer_on_host is not None else [])]:
        start = with_field_values(changed_recipe, fixed_values)
        choices = list_choices(list_memory_moves(start, judge), is_partial=True)
        if fixed_values:
            # Moving the optimizer to the host may be enough by itself.
            choices = [Choice(values={}), *choices]
        ranking = search(
            start,
            choices,
            lambda candidate, _: judge.accept(candidate),
            lambda change, start=start: total_cost(start, change),
            count=max_remedies,
            skips=_changes_more_than_needed,
        )
        if ranking.changes:
            return [{**required_values} | fixed_values | {**change.values} for change in ranking.changes]
    return []


def _changes_more_than_needed(choice: Choice, accepted: Sequence[Choice]) -> bool:
    # Choices with few fields come first: an accepted choice never has more fields than a later one.
    return any(smaller.key <= choice.key for smaller in accepted)


def _optimizer_on_host(recipe: Recipe) -> dict[str, Any] | None:
    """Return the field values that move the optimizer to the host. None: impossible, or already done."""
    trainer = recipe.trainer
    if any(obstacles(recipe)) or trainer.optimizer_offload_fraction == 1:
        return None
    values: dict[str, Any] = {"trainer.optimizer_offload_fraction": 1.0}
    # An optimizer on the host has no states left to offload, and the recipe check rejects both together.
    if "optimizer" in trainer.offload:
        values["trainer.offload"] = tuple(name for name in trainer.offload if name != "optimizer")
    return values


def find_wider_remedy(recipe: Recipe, judge: MemoryJudge) -> dict[str, Any] | None:
    """Return a doubled parallel size or number of nodes with which the recipe fits, plus one more change if needed."""
    trainer, cluster = recipe.trainer, recipe.cluster
    engines = ({"rollout.tp": 2 * recipe.rollout.tp},) if recipe.separate_ranks else ()
    # Ordered by cost: engines first, then trainer sizes on the same nodes, then more nodes.
    wider_sizes: tuple[dict[str, Any], ...] = (
        *engines,
        {"trainer.tp": 2 * trainer.tp},
        {"trainer.pp": 2 * trainer.pp},
        {"cluster.nodes": 2 * cluster.nodes},
        {"trainer.tp": 2 * trainer.tp, "cluster.nodes": 2 * cluster.nodes},
        {"trainer.pp": 2 * trainer.pp, "cluster.nodes": 2 * cluster.nodes},
    )

    def accept(wider_recipe: Recipe, choice: Choice) -> dict[str, Any] | None:
        """Return one more change that the wider recipe needs, empty if it fits without; None: it cannot fit."""
        # The data-parallel size follows from the other sizes.
        wider_recipe = (
            wider_recipe if wider_recipe.trainer.dp is None else with_field_values(wider_recipe, {"trainer.dp": None})
        )
        models = models_of(wider_recipe, sizes.parallel_of(wider_recipe))
        if next(_size_faults(wider_recipe, models), None) is not None:
            return None
        wider_judge = MemoryJudge(models, judge.gpus)
        if wider_judge.accept(wider_recipe) is not None:
            return {}
        return next(iter(remedies(wider_recipe, wider_judge, max_remedies=1)), None)

    choices = iterate_in_order(wider_sizes)
    ranking = search(recipe, choices, accept, lambda change: change.choice.cost, bound=lambda choice: choice.cost)
    return next(({**change.values, **change.outcome} for change in ranking.changes), None)


def _size_faults(recipe: Recipe, models: Models) -> Iterator[str]:
    yield from sizes.find_rank_faults(recipe)
    yield from sizes.find_batch_faults(recipe, sizes.parallel_of(recipe).dp)
    yield from model_sizes.find_size_faults(recipe, models.policy.shape)


def cache_remedies(recipe: Recipe, judge: MemoryJudge) -> list[dict[str, Any]]:
    """Return changes with which the KV cache holds the longest possible request.

    None as the cache's size: leave the field out, the default is enough.
    """
    gpu_share = recipe.rollout.gpu_memory_utilization
    if gpu_share is not None:
        # Try shares in hundredths, the smallest first.
        larger_shares = [percent / 100 for percent in range(1, 101) if percent / 100 > gpu_share]
        return _find_first_change(recipe, judge, [{_SHARE: larger_share} for larger_share in larger_shares])
    if _find_first_change(recipe, judge, [{_CACHE: default_cache_gib(recipe, judge)}]):
        return [{_CACHE: None}]
    # With the smallest cache the run does not fit, so it needs another change.
    least_gib = least_cache_gib(recipe, judge.models.policy.shape)
    return remedies(recipe, judge, required_values={_CACHE: least_gib})


def _find_first_change(recipe: Recipe, judge: MemoryJudge, values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first change with which the recipe fits and the cache holds the longest request."""

    def accept(changed: Recipe, _: Choice) -> MemoryTable | None:
        table = judge.accept(changed)
        return table if table is not None and holds_longest_request(table) else None

    ranking = search(
        recipe, iterate_in_order(values), accept, lambda change: change.choice.cost, bound=lambda choice: choice.cost
    )
    return [{**change.values} for change in ranking.changes]


def cache_remedies_on_cpus(recipe: Recipe, models: Models, limit_bytes: int) -> list[dict[str, Any]]:
    """Return field values for the smallest sufficient KV cache on CPUs.

    Empty: it exceeds `limit_bytes` of a node's memory, or cannot hold the longest request.
    """
    values = {_CACHE: least_cache_gib(recipe, models.policy.shape)}
    changed_recipe = with_field_values(recipe, values)
    table = memory_table(changed_recipe, models, CPU)
    fits = fullest_node_bytes(changed_recipe, table) <= limit_bytes
    return [values] if fits and holds_longest_request(table) else []


def holds_longest_request(table: MemoryTable) -> bool:
    return table.cache is None or table.cache.longest_requests >= 1
