"""When a run evaluates: before its first step, unless that is switched off; a run of no steps does nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megarl.config import Recipe
from megarl.loops.session import Session


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({}, True),
        ({"evaluation": {"at_start": False}}, False),
        ({"evaluation": {"at_start": False}, "train": {"steps": 0}}, True),
    ],
)
def test_the_first_evaluation_may_be_left_out(settings: dict[str, Any], first: bool) -> None:
    recipe = Recipe.model_validate(
        {"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}, **settings}
    )
    session = cast(Session, SimpleNamespace(recipe=recipe))
    assert cast(property, Session.evaluates_first).fget(session) is first  # type: ignore[misc]
