"""Shapes of the models that a recipe names, for plans: config.json is all that is read."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import read_model_shape
from megarl.memory.models import Models, read_models
from megarl.preflight import sizes


def models_of(recipe: Recipe, layout: ParallelConfig) -> Models:
    """The models of a recipe that can be planned. Raises DataError for a config.json."""
    shape = read_model_shape(recipe.model.folder, recipe.model.override_config)
    return read_models(recipe, shape, layout, sizes.layout_of(recipe.for_teachers))
