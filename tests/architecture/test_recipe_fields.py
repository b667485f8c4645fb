"""What recipe fields say about themselves agrees with the other fields and with the formulas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.config import Recipe
from megarl.config.effects import conditions
from megarl.config.formulas import formula_fields, formulas, keyword_fields
from megarl.config.schema import all_fields


def fields(section: type, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


@pytest.mark.parametrize("loop", ["rl", "sft", "preference", "reward_model", "distillation"])
def test_conditions_read_fields_that_are_there(loop: str) -> None:
    recipe = Recipe.model_validate({"name": "x", "loop": loop, "model": {"path": "m"}, "data": {"train": "t"}})
    conditional = {name: found for name in fields(Recipe) if (found := conditions(name))}
    assert len(conditional) > 150
    for condition in (condition for found in conditional.values() for condition in found):
        assert isinstance(condition.holds(recipe), bool)
        assert condition.state(recipe)
        assert all(field in all_fields() for field in condition.fields)


@pytest.mark.parametrize("field", formula_fields())
def test_keywords_with_a_field_of_their_own_are_keywords(field: str) -> None:
    taken = {keyword for keywords in formulas(field).values() for keyword in keywords}
    assert (keyword_fields(field).keys() | set(formula_fields()[field].measured)) - taken == set()
    assert keyword_fields(field)
