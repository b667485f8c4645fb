"""The rules of `tracking.health` that apply to a recipe, and a check of its learning rate."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.config.formulas import taking
from megarl.config.health import HealthConfig
from megarl.families.shape import read_model_shape
from megarl.tracking.health import LEARNING_RATE, Finding, unusual_learning_rate, usual_learning_rates

_OF_REWARDS = ("no_gradient", "constant_reward", "validation_falling")
_OF_SAMPLES = ("entropy_collapsed",)
"""Off for loops that imitate data: their models may well become certain of it."""


def thresholds(recipe: Recipe) -> HealthConfig:
    """Return the recipe's section `health` with rules off if they do not apply to its loop or algorithm."""
    off = set(recipe.health.off)
    if recipe.loop != "rl":
        off.update(_OF_REWARDS)
    if not recipe.is_on_policy:
        off.update(_OF_SAMPLES)
    # Other estimators do not subtract the group's mean. Equal rewards in a group still give a gradient there.
    of_groups = {*taking("algorithm.advantage", "lone_sample"), "pass_at_k"}
    if recipe.algorithm.advantage not in of_groups:
        off.add("no_gradient")
    return recipe.health.model_copy(update={"off": tuple(sorted(off))})


def learning_rate_finding(recipe: Recipe, step: int = 0) -> Finding | None:
    """Return a finding if the learning rate of a start after `step` is unusual for the model.

    None: the rate is usual, nothing is trained, or the optimizer is SGD without a range in the recipe (SGD has no usual
    range).
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
