"""Fields that were removed: a value is an error with the replacement, null is dropped with a notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.hints.foreign import REMOVED
from megarl.config.recipe import read, recipe_changes
from megarl.config.schema import all_fields


@pytest.mark.parametrize("field", REMOVED)
def test_a_value_is_an_error_with_the_replacement(small: Path, field: str) -> None:
    assert field not in all_fields()
    (problem,) = read(small, [f"{field}=http://127.0.0.1:4318"]).problems
    assert problem.startswith(f"{field} = ") and problem.endswith(REMOVED[field])


@pytest.mark.parametrize("field", REMOVED)
def test_null_is_dropped_with_a_notice(small: Path, field: str) -> None:
    draft = read(small, [f"{field}=null"])
    assert draft.problems == () and [field in notice for notice in draft.recipe.notices] == [True]


@pytest.mark.parametrize("value", ["null", "x"])
@pytest.mark.parametrize("field", REMOVED)
def test_the_recipe_of_an_earlier_run_is_read(small: Path, field: str, value: str) -> None:
    draft = read(small, [f"{field}={value}"], is_of_run=True)
    assert draft.problems == () and len(draft.recipe.notices) == (value == "x")


@pytest.mark.parametrize("field", REMOVED)
def test_a_removed_field_that_was_not_set_is_no_change_of_a_run(small: Path, field: str) -> None:
    recipe = read(small).recipe
    *sections, name = field.split(".")
    earlier: dict[str, object] = {name: None}
    for section in reversed(sections):
        earlier = {section: earlier}
    assert not any(field in line for line in recipe_changes(earlier, recipe))


def test_a_value_from_the_environment_is_shown_as_written(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be secret, and no reference to it stays in the recipe."""
    monkeypatch.setenv("OTLP_URL", "http://user:secret@host:4318")
    draft = read(small, ["monitor.otlp_url=${oc.env:OTLP_URL}"], is_of_run=True)
    [notice] = draft.recipe.notices
    assert "${oc.env:OTLP_URL}" in notice and "secret" not in notice
    assert not any("otlp_url" in place for place in draft.recipe.references)
