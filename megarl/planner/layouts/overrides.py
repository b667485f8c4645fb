"""Command-line overrides that turn a recipe into another layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import Recipe
from megarl.config.corrections import lacks_correction
from megarl.config.effects import unmet
from megarl.config.idle import fields_set_by_user
from megarl.config.reading.override_text import short_override
from megarl.config.schema import all_fields, value_at
from megarl.planner.layouts.candidates import Placement
from megarl.planner.search import with_field_values
from megarl.planner.sizes import WHOLE_EXPERTS, has_whole_experts

_CORRECTION = "algorithm.importance_sampling"
_PLANNED = ("rollout.kv_cache_gib", "trainer.offload", "trainer.recompute")
"""Fields that a start computes from memory if the recipe leaves them out."""


def placement_values(recipe: Recipe, placement: Placement) -> dict[str, Any]:
    """Return the recipe fields of a placement.

    A field without effect under the placement gets its default (`weights.overlap` with colocated engines).
    `algorithm.importance_sampling` is set if samples would be stale and uncorrected.
    """
    values = dict(placement.values)
    placed_recipe = with_field_values(recipe, values)
    for field in _list_idle_fields(recipe, placed_recipe):
        values[field] = all_fields()[field].get_default(call_default_factory=True)
    placed_recipe = with_field_values(recipe, values)
    if lacks_correction(placed_recipe):
        values[_CORRECTION] = "tis"
    return values


def overrides_between(recipe: Recipe, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command-line overrides that set `values`, keyed by dotted field name.

    A field of the recipe that loses its effect gets `=default`.
    """
    changed_recipe = with_field_values(recipe, values)
    idle_fields = _list_idle_fields(recipe, changed_recipe)
    recipe_fields = set(fields_set_by_user(recipe))
    # Write these fields even with their default value. Otherwise a start would compute another value.
    changed_values = {
        field: value
        for field, value in values.items()
        if field != "rollout.vllm"
        and unmet(changed_recipe, field) is None
        and (value_at(recipe, field) != value or (field in _PLANNED and field not in recipe_fields))
    }
    if has_whole_experts(changed_recipe) != has_whole_experts(recipe):
        changed_values[f"rollout.vllm.{WHOLE_EXPERTS}"] = True if has_whole_experts(changed_recipe) else None
    return tuple(short_override(field, value) for field, value in (changed_values | dict.fromkeys(idle_fields)).items())


def _list_idle_fields(recipe: Recipe, changed_recipe: Recipe) -> list[str]:
    """Return the fields that `recipe` sets and that `changed_recipe` would ignore, except fields of a mixture's
    sources.
    """
    # Fields of nested sections do not depend on the layout.
    return [
        field
        for field in fields_set_by_user(recipe)
        if field.count(".") == 1 and unmet(changed_recipe, field) is not None
    ]
