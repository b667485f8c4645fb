"""Who judges the answer: accuracy, pass@k and majority@k count the verdicts of these functions and environments alone.

A reward is not a verdict. A function for brevity or format pays for a wrong answer too, so its score says nothing about
the answer unless the recipe or the function says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.config.rewards import RewardFunctionConfig

Judging = Literal["declared", "by_value", "none"]
"""declared: the verdict is known for each answer. by_value: a score of 1 means right and 0 wrong, and the first other
score shows that it is not a verdict. none: there is no verdict."""

JUDGES = frozenset(
    {"boxed", "think_answer_tags", "gsm8k", "math_competition", "multiple_choice", "code", "reasoning_gym"}
)
"""Built-in reward functions that compare the answer with the gold answer, or test it."""
SCORERS = frozenset({"format", "length"})
"""Built-in reward functions that do not look at the answer."""

SCORED_BY_FUNCTIONS = frozenset({"single_turn", "calculator", "python", "search"})
"""Environments without rewards of their own: `reward.functions` score their attempts."""
JUDGING_ENVIRONMENTS = frozenset({"countdown", "guess_number", "mastermind", "reasoning_gym", "gem"})
"""Environments that give a verdict with their last reward."""

REMEDY = "set judges_answer: true on the function of reward.functions whose score says whether the answer is right"


def judging(functions: Sequence[RewardFunctionConfig]) -> dict[str, Judging]:
    """How each reward function judges the answer, by its name in the recipe."""
    return {function.name: _judging_of(function, is_only=len(functions) == 1) for function in functions}


def judges_answers(recipe: Recipe) -> Judging:
    """How the attempts of a recipe of one source are judged, as far as this is known before a start."""
    if recipe.rollout.environment in JUDGING_ENVIRONMENTS:
        return "declared"
    if recipe.rollout.environment not in SCORED_BY_FUNCTIONS:
        return "by_value"  # An environment of the user's may score its attempts itself, with or without verdicts.
    return strongest(judging(recipe.reward.functions).values())


def accuracy_needs(recipe: Recipe) -> list[str]:
    """The fields of a recipe of one source, `FIELD = VALUE`, that cannot work without verdicts in training."""
    if recipe.loop != "rl":
        return _curriculum_need(recipe) if recipe.loop == "distillation" else []
    algorithm = recipe.algorithm
    found = []
    if algorithm.advantage == "pass_at_k":
        found.append("algorithm.advantage = pass_at_k")
    if allowed := algorithm.dynamic_sampling:
        if algorithm.dynamic_sampling_metric == "accuracy":
            found.append("algorithm.dynamic_sampling_metric = accuracy")
        elif algorithm.dynamic_sampling_metric is None and allowed[1] < 1:
            found.append(f"algorithm.dynamic_sampling = {list(allowed)}")
    return found + _curriculum_need(recipe)


def _curriculum_need(recipe: Recipe) -> list[str]:
    band = recipe.data.curriculum.band
    return [] if band is None else [f"data.curriculum.band = {list(band)}"]


def strongest(found: Iterable[Judging]) -> Judging:
    """How several functions judge together: one verdict is enough."""
    kinds = set(found)
    return "declared" if "declared" in kinds else "by_value" if "by_value" in kinds else "none"


def _judging_of(function: RewardFunctionConfig, *, is_only: bool) -> Judging:
    if function.judges_answer is not None:
        return "declared" if function.judges_answer else "none"
    kind = function.name.partition(".")[0] if ":" not in function.name else function.name
    if kind in JUDGES or _is_judging_server(kind, function):
        return "declared"
    return "by_value" if is_only and kind not in SCORERS else "none"


def _is_judging_server(kind: str, function: RewardFunctionConfig) -> bool:
    """Whether a server's score is a verdict: by a threshold, or by the choices CORRECT and INCORRECT of a judge."""
    if kind not in ("judge", "remote"):
        return False
    kwargs = function.kwargs
    has_own_scores = kwargs.get("choices") is not None or kwargs.get("scale") is not None
    return kwargs.get("correct_from") is not None or (kind == "judge" and not has_own_scores)
