"""A recipe's file with further overrides, checked by the rules of a start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megarl.config import Recipe
from megarl.config.recipe import load
from megarl.planner.sizes import parallel_of
from megarl.preflight.registry import Cost, faults
from megarl.types import ConfigError


@dataclass(frozen=True)
class RecipeFile:
    """A recipe's file with the command line's overrides, to which callers add further ones on trial."""

    path: str | Path
    overrides: tuple[str, ...] = ()

    def refusal(self, overrides: Sequence[str]) -> str | None:
        """Return the first error that further overrides cause, or None. Only rules about fields are checked."""
        try:
            recipe = load(self.path, (*self.overrides, *overrides))
        except ConfigError as error:
            return str(error)
        return next((fault for fault in _find_field_faults(recipe) if fault not in self._own_faults), None)

    @cached_property
    def _own_faults(self) -> frozenset[str]:
        return frozenset(_find_field_faults(load(self.path, self.overrides)))


def _find_field_faults(recipe: Recipe) -> list[str]:
    messages: list[str] = []
    facts = {"is_start": False, "is_trained": True, "has_model": False}
    for source in recipe.sources:
        facts_of_source = {**facts, "recipe": source.recipe, "dp": parallel_of(source.recipe).dp}
        messages += map(str, faults(facts_of_source, (Cost.FIELDS,)))
    return [*messages, *map(str, faults({**facts, "recipe": recipe}, (Cost.FIELDS,), per_run=True))]
