"""The rules of `tracking.health` that fit a recipe, and its learning rate against the usual range."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.config.formulas import taking
from megarl.config.health import HealthConfig
from megarl.families.shape import read_model_shape
from megarl.tracking.health import LEARNING_RATE, Finding, unusual_learning_rate, usual_learning_rates

_OF_REWARDS = ("no_gradient", "constant_reward", "validation_falling")
_OF_SAMPLES = ("entropy_collapsed",)
"""A model that imitates data may become certain of them."""


def thresholds(recipe: Recipe) -> HealthConfig:
    """The recipe's section `health`, with the rules off that say nothing about its loop and algorithm."""
    off = set(recipe.health.off)
    if recipe.loop != "rl":
        off.update(_OF_REWARDS)
    if not recipe.is_on_policy:
        off.update(_OF_SAMPLES)
    # The other estimators have a baseline that is not the group's: equal rewards of a group still have a gradient.
    of_groups = {*taking("algorithm.advantage", "lone_sample"), "pass_at_k"}
    if recipe.algorithm.advantage not in of_groups:
        off.add("no_gradient")
    return recipe.health.model_copy(update={"off": tuple(sorted(off))})


def learning_rate_finding(recipe: Recipe, step: int = 0) -> Finding | None:
    """The finding of a start after `step` whose learning rate is unusual for the model.

    None where it is usual, where nothing is trained, and for SGD without a range of the recipe's own, whose rates have
    no common range.
    """
    given = recipe.health.learning_rate
    if (
        LEARNING_RATE in recipe.health.off
        or not recipe.train.steps
        or (given is None and recipe.optimizer.name == "sgd")
    ):
        return None
    if given is None:
        shape = read_model_shape(recipe.model.folder, recipe.model.override_config)
        given = usual_learning_rates(shape.hidden_size, has_lora=recipe.lora.rank > 0)
    return unusual_learning_rate(recipe.optimizer.learning_rate, given, step)
