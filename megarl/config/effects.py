"""Whether recipe fields have an effect: whether the conditions at a field (`OnlyIf`, `KeywordOf`) hold.

The schema is one model with conditions at its fields, not a union of models chosen by `loop`. A union would have these
drawbacks:

- A misspelt `loop` hides all other errors, and errors name the union's variants.
- A condition on the algorithm (gae, clipped, kto) needs one model per combination.
- Code that reads `recipe.algorithm` must narrow the type first.

Only fields set by the user can be errors: defaults and values of a preset may have no effect. Fields that describe
machines (`cluster.*`) are always accepted, because one recipe runs under any launcher.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from megarl.config.annotations import Condition, KeywordOf, OnlyIf
from megarl.config.conditions import OVERRIDDEN_BY_ALL_SOURCES, takes
from megarl.config.schema import annotated_with, value_at
from megarl.files.import_path import imported_object, is_import_path

if TYPE_CHECKING:
    from megarl.config import Recipe


@cache
def conditions(field: str) -> tuple[Condition, ...]:
    """Return all conditions of a field's effect, including those of the sections around it."""
    parts, field_conditions = field.split("."), []
    for num_parts in range(1, len(parts) + 1):
        for layer_conditions in _list_condition_layers(".".join(parts[:num_parts])):
            decided_fields = {condition.fields for condition in layer_conditions}
            field_conditions = [
                condition for condition in field_conditions if condition.fields not in decided_fields
            ] + layer_conditions
    # Name the loop first: under another loop, the other conditions would mislead.
    return tuple(sorted(field_conditions, key=lambda condition: condition.fields != ("loop",)))


def _list_condition_layers(field: str) -> Iterator[list[Condition]]:
    """Yield the conditions of the sections around a field, outermost first, then the field's own.

    Later ones replace earlier ones on the same fields.
    """
    section, _, name = field.rpartition(".")
    for keyword in annotated_with(field, KeywordOf):
        yield [*conditions(keyword.formula), takes(keyword.formula, keyword.name or name)]
    for item in annotated_with(field, OnlyIf):
        yield [entry if isinstance(entry, Condition) else entry(section) for entry in item.conditions]


def unmet(recipe: Recipe, field: str) -> Condition | None:
    """Return the first condition of a field that the recipe does not meet; None: the field has an effect.

    In a mixture, it is enough if the field has an effect in one source that does not override it.
    """
    # A source's recipe has no mixture, so a condition on the mixture is checked in the whole recipe.
    on_mixture = (condition for condition in conditions(field) if condition.fields == ("mixture",))
    if recipe.mixture and (condition := next(on_mixture, None)) is not None:
        return condition
    unmet_by_source = [unmet_in(source.recipe, field) for source in recipe.sources if source.place(field) == field]
    if not unmet_by_source:
        return OVERRIDDEN_BY_ALL_SOURCES
    return None if None in unmet_by_source else unmet_by_source[0]


def unmet_in(recipe: Recipe, field: str) -> Condition | None:
    """Like `unmet`, for the recipe of a single source (`Recipe.sources`)."""
    return next((condition for condition in conditions(field) if not condition.holds(recipe)), None)


def may_be_idle(recipe: Recipe, field: str) -> bool:
    """Return whether a field is a keyword argument that a user's formula lacks, or is not imported yet."""
    user_formulas = [
        (path, item.name or field.rpartition(".")[2])
        for item in annotated_with(field, KeywordOf)
        if is_import_path(path := value_at(recipe, item.formula) or "")
    ]
    return any(not _formula_takes(path, keyword) for path, keyword in user_formulas)


def _formula_takes(path: str, keyword: str) -> bool:
    if (formula := imported_object(path)) is None:
        return False
    parameters = inspect.signature(formula).parameters
    return keyword in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
