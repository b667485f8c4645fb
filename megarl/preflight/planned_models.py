"""Shapes of a recipe's models for plans. Only config.json is read, if it exists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.published import published_name
from megarl.families.shape import planned_shape
from megarl.memory_plan.models import Models, read_models
from megarl.preflight import sizes


def models_of(recipe: Recipe, layout: ParallelConfig) -> Models:
    """Return the models of a recipe for a plan. Raises DataError for an invalid config.json."""
    shape = planned_shape(recipe.model.folder, recipe.model.override_config)
    return read_models(recipe, shape, layout, sizes.layout_of(recipe.for_teachers))


def not_downloaded(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each model planned by its published sizes because its folder does not exist."""
    for folder in dict.fromkeys((recipe.model.folder, *recipe.further_models.values())):
        if not Path(folder).is_dir() and (name := published_name(folder)) is not None:
            yield f"{folder} is not there: planned with the sizes of {name}; before a start: hf download {name}"
