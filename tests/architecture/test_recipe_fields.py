"""Every field of a recipe has a place in the table of effects, and every keyword of a formula is a setting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.config import Recipe
from megarl.config.effects import EFFECTS, value_at
from megarl.config.formulas import FIELDS, MEASURED, TABLES, formulas


def fields(section: type, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def around(name: str) -> list[str]:
    """A dotted name and the sections around it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def test_every_field_is_in_the_table_once() -> None:
    places = {field: [name for name in around(field) if name in EFFECTS] for field in fields(Recipe)}
    assert {field: found for field, found in places.items() if len(found) != 1} == {}, "say in EFFECTS what it needs"


def test_the_table_names_fields_and_sections_only() -> None:
    known = {name for field in fields(Recipe) for name in around(field)}
    assert EFFECTS.keys() - known == set()


@pytest.mark.parametrize("loop", ["rl", "sft", "preference", "reward_model", "distillation"])
def test_conditions_read_fields_that_are_there(loop: str) -> None:
    recipe = Recipe.model_validate({"name": "x", "loop": loop, "model": {"path": "m"}, "data": {"train": "t"}})
    for needs in EFFECTS.values():
        for need in needs:
            assert isinstance(need.holds(recipe), bool)
            assert all(value_at(recipe, field) is not Ellipsis for field in need.fields)


@pytest.mark.parametrize("field", TABLES)
def test_keywords_with_a_field_of_their_own_are_keywords(field: str) -> None:
    taken = {keyword for keywords in formulas(field).values() for keyword in keywords}
    assert (FIELDS[field].keys() | set(MEASURED.get(field, ()))) - taken == set()
    assert set(FIELDS[field].values()) <= set(fields(Recipe))
