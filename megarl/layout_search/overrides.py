"""Command-line overrides that make a recipe a found layout, and their check by the rules of a start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.config.effects import unmet
from megarl.config.idle import given_fields
from megarl.config.override_text import short_override
from megarl.config.recipe import load
from megarl.config.schema import all_fields, value_at
from megarl.layout_search.candidates import WHOLE_EXPERTS, Placement, has_whole_experts
from megarl.memory_plan.remedies import with_field_values
from megarl.preflight import sizes
from megarl.preflight.off_policy import staleness
from megarl.preflight.registry import Cost, faults
from megarl.types import ConfigError

_CORRECTION = "algorithm.importance_sampling"
_PLANNED = ("rollout.kv_cache_gib", "trainer.offload", "trainer.recompute")
"""Fields for which a start plans a value if the recipe leaves them out, instead of the field's default."""


def placement_values(recipe: Recipe, placement: Placement) -> dict[str, Any]:
    """Return the recipe fields of a placement, with a correction if stale samples would be trained without one.

    Fields without effect under the placement get their defaults, for example `weights.overlap` with colocated engines.
    """
    values = dict(placement.values)
    placed = with_field_values(recipe, values)
    for field in _idle(recipe, placed):
        values[field] = all_fields()[field].get_default(call_default_factory=True)
    placed = with_field_values(recipe, values)
    if any(f"set {_CORRECTION}=tis" in fault for fault in staleness(placed)):
        values[_CORRECTION] = "tis"
    return values


def overrides_between(recipe: Recipe, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides that give a recipe these values of fields, by dotted name.

    A field of the recipe without effect under the new values is removed: `trainer.recompute_modules=default`.
    """
    changed_recipe = with_field_values(recipe, values)
    idle = _idle(recipe, changed_recipe)
    recipe_fields = set(given_fields(recipe))
    # Without its own line a value equal to the field's default would become the planned value of the start.
    changed = {
        field: value
        for field, value in values.items()
        if field != "rollout.vllm"
        and unmet(changed_recipe, field) is None
        and (value_at(recipe, field) != value or (field in _PLANNED and field not in recipe_fields))
    }
    if has_whole_experts(changed_recipe) != has_whole_experts(recipe):
        changed[f"rollout.vllm.{WHOLE_EXPERTS}"] = True if has_whole_experts(changed_recipe) else None
    return tuple(short_override(field, value) for field, value in (changed | dict.fromkeys(idle)).items())


def _idle(recipe: Recipe, changed_recipe: Recipe) -> list[str]:
    """Return the fields given in a recipe that have no effect in another one. Sources of a mixture are left out."""
    # A field of a section inside a section does not depend on the layout.
    return [
        field for field in given_fields(recipe) if field.count(".") == 1 and unmet(changed_recipe, field) is not None
    ]


@dataclass(frozen=True)
class RecipeFile:
    """A recipe's file with the overrides of the command line: where the overrides of a layout are added."""

    path: str | Path
    overrides: tuple[str, ...] = ()

    def refusal(self, overrides: Sequence[str]) -> str | None:
        """Return the first error of the recipe with further overrides. None: a start would accept them.

        Checked are all rules about fields, not files. Errors of the recipe itself do not count.
        """
        try:
            recipe = load(self.path, (*self.overrides, *overrides))
        except ConfigError as error:
            return str(error)
        return next((fault for fault in _field_faults(recipe) if fault not in self._own_faults), None)

    @cached_property
    def _own_faults(self) -> frozenset[str]:
        return frozenset(_field_faults(load(self.path, self.overrides)))


def _field_faults(recipe: Recipe) -> list[str]:
    """Return the errors of all sources of a recipe by the rules about fields."""
    messages: list[str] = []
    facts = {"is_start": False, "is_trained": True, "has_model": False}
    for source in recipe.sources:
        facts_of_source = {**facts, "recipe": source.recipe, "dp": sizes.parallel_of(source.recipe).dp}
        messages += map(str, faults(facts_of_source, (Cost.FIELDS,)))
    return [*messages, *map(str, faults({**facts, "recipe": recipe}, (Cost.FIELDS,), per_run=True))]
