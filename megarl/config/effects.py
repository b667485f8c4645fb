"""Effects of recipe fields: whether a recipe meets the conditions of a field (`OnlyIf`, `KeywordOf`).

The schema is one model with conditions at its fields, not a union of models chosen by `loop`. A union has four faults.
A misspelt `loop` hides all other errors. Field names get the union's tags as a prefix. A condition on the algorithm
(gae, clipped, kto) needs a model per combination. Every reader of `recipe.algorithm` must narrow the type first. With
conditions the error explains why a field does nothing.

Only given fields are errors: defaults and a preset's values may have no effect. Descriptions of machines (`cluster.*`)
are always accepted, because one recipe runs under any launcher.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from megarl.config.annotations import Condition, KeywordOf, OnlyIf
from megarl.config.conditions import NOT_OWN, takes
from megarl.config.schema import annotated_with, value_at
from megarl.files.import_path import is_import_path

if TYPE_CHECKING:
    from megarl.config import Recipe


@cache
def conditions(field: str) -> tuple[Condition, ...]:
    """Return all conditions of a field, those of the sections around it included."""
    parts, found = field.split("."), []
    for end in range(1, len(parts) + 1):
        for layer in _layers(".".join(parts[:end])):
            decided = {condition.fields for condition in layer}
            found = [condition for condition in found if condition.fields not in decided] + layer
    # The loop comes first: under another loop the other conditions would mislead.
    return tuple(sorted(found, key=lambda condition: condition.fields != ("loop",)))


def _layers(place: str) -> Iterator[list[Condition]]:
    """Yield the conditions written at a field or section. A later one replaces earlier ones on the same field."""
    section, _, name = place.rpartition(".")
    for keyword in annotated_with(place, KeywordOf):
        yield [*conditions(keyword.formula), takes(keyword.formula, keyword.name or name)]
    for item in annotated_with(place, OnlyIf):
        yield [own if isinstance(own, Condition) else own(section) for own in item.conditions]


def unmet(recipe: Recipe, field: str) -> Condition | None:
    """Return the first unmet condition of a field (the field does nothing), or None if it has an effect.

    In a mixture one source using the recipe's value is enough for an effect.
    """
    # A source's recipe has an empty mixture, so a condition on the mixture is checked on the whole recipe.
    on_mixture = (condition for condition in conditions(field) if condition.fields == ("mixture",))
    if recipe.mixture and (condition := next(on_mixture, None)) is not None:
        return condition
    found = [unmet_in(source.recipe, field) for source in recipe.sources if source.place(field) == field]
    return NOT_OWN if not found else None if None in found else found[0]


def unmet_in(recipe: Recipe, field: str) -> Condition | None:
    """Return the first unmet condition for a recipe field to have an effect. None: the recipe meets all of them.

    `recipe` is the recipe of a single source (`Recipe.sources`): without a mixture, the run's.
    """
    return next((condition for condition in conditions(field) if not condition.holds(recipe)), None)


def may_be_idle(recipe: Recipe, field: str) -> bool:
    """Return whether a field is a keyword argument of a user's own formula, so its use is unknown."""
    return any(is_import_path(value_at(recipe, item.formula) or "") for item in annotated_with(field, KeywordOf))
