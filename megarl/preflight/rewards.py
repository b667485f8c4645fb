"""Checks of the section `reward`: its fields fit each other, and its functions exist."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from megarl.config import Recipe
from megarl.config.judges import REMEDY, find_recipe_judging, list_accuracy_needs
from megarl.datasets.fields import system_prompt
from megarl.preflight.registry import Cost, checks
from megarl.rewards import find_import_path, metric_name
from megarl.types import ConfigError


@checks("reward", Cost.FILES)
def check_reward_fields(recipe: Recipe) -> Iterator[str]:
    """Yield an error for missing, repeated or unknown reward functions, and for a wrong system prompt."""
    reward = recipe.reward
    only_teaches = recipe.loop == "distillation" and not recipe.trains_rewards and not recipe.data.validation
    if recipe.has_engine and not reward.functions and not only_teaches:
        yield "reward.functions is empty: add at least one. With reward.model, weight 0 measures accuracy only"
    names = [function.name for function in reward.functions]
    for name in {name: None for name in names if names.count(name) > 1}:
        yield f"reward.functions = {names}: {name} is listed twice and would count twice; list it once"
    # Metrics are named after functions, and different import paths may give the same name.
    for name, other_name in combinations(dict.fromkeys(names), 2):
        if metric_name(name) == metric_name(other_name):
            yield (
                f"reward.functions = {names}: {name} and {other_name} would have the same metric "
                f"reward/{metric_name(name)}/mean; give one function another name"
            )
    for name in names:
        try:
            find_import_path(name)
        except ConfigError as error:
            yield str(error)
    try:
        system_prompt(recipe)
    except ConfigError as error:
        yield str(error)


@checks("reward")
def check_verdicts(recipe: Recipe) -> Iterator[str]:
    """Yield an error for each setting that needs right-or-wrong verdicts, if no function gives them."""
    if not recipe.has_engine or find_recipe_judging(recipe) != "none":
        return
    for need in list_accuracy_needs(recipe):
        yield (
            f"{need}: needs accuracy, but no reward function decides whether an answer is right; {REMEDY}, or leave "
            "this out"
        )
