"""How a run knows whether an answer is right: by verdicts of reward functions and environments.

Accuracy, pass@k and majority@k count verdicts. A score alone is not a verdict: a function for brevity or format rewards
wrong answers too. The recipe or the function must declare that a score is a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.types import Judging, strongest

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.config.sections.rewards import RewardFunctionConfig

JUDGES = frozenset(
    {
        "boxed",
        "think_answer_tags",
        "gsm8k",
        "math_competition",
        "math_verify",
        "multiple_choice",
        "code",
        "reasoning_gym",
    }
)
"""Built-in reward functions with a verdict: they compare the answer with the gold answer, or test it."""
SCORERS = frozenset({"format", "length"})
"""Built-in reward functions without a verdict, because they ignore the answer's content."""

SCORED_BY_FUNCTIONS = frozenset({"single_turn", "calculator", "python", "search"})
"""Environments without rewards: `reward.functions` score their attempts."""
JUDGING_ENVIRONMENTS = frozenset({"countdown", "guess_number", "mastermind", "reasoning_gym", "gem"})
"""Environments whose last reward is the verdict on the policy's answer."""

REMEDY = "set judges_answer: true on the function of reward.functions scoring whether the answer is right"


def judging(functions: Sequence[RewardFunctionConfig]) -> dict[str, Judging]:
    return {function.name: _find_judging(function, is_only=len(functions) == 1) for function in functions}


def find_recipe_judging(recipe: Recipe) -> Judging:
    """Return how the attempts of a recipe are judged (`Judging`): by a declared verdict, by score, or not at all."""
    if recipe.rollout.environment in JUDGING_ENVIRONMENTS:
        return "declared"
    if recipe.rollout.environment not in SCORED_BY_FUNCTIONS:
        return "by_value"  # A user's environment may score its attempts, with or without verdicts.
    return strongest(judging(recipe.reward.functions).values())


def list_accuracy_needs(recipe: Recipe) -> list[str]:
    """Return the fields (`FIELD = VALUE`) that need verdicts for training."""
    if not recipe.trains_rewards:
        return _curriculum_need(recipe) if recipe.loop == "distillation" else []
    algorithm = recipe.algorithm
    needing_fields = []
    if algorithm.advantage == "pass_at_k":
        needing_fields.append("algorithm.advantage = pass_at_k")
    if accuracy_range := algorithm.dynamic_sampling:
        if algorithm.dynamic_sampling_metric == "accuracy":
            needing_fields.append("algorithm.dynamic_sampling_metric = accuracy")
        elif algorithm.dynamic_sampling_metric is None and accuracy_range[1] < 1:
            needing_fields.append(f"algorithm.dynamic_sampling = {list(accuracy_range)}")
    return needing_fields + _curriculum_need(recipe)


def _curriculum_need(recipe: Recipe) -> list[str]:
    band = recipe.data.curriculum.band
    return [] if band is None else [f"data.curriculum.band = {list(band)}"]


def _find_judging(function: RewardFunctionConfig, *, is_only: bool) -> Judging:
    """Return how one reward function judges answers: as declared, as known, or by its value if it is the only one."""
    if function.judges_answer is not None:
        return "declared" if function.judges_answer else "none"
    kind = function.name.partition(".")[0] if ":" not in function.name else function.name
    if kind in JUDGES or _is_judging_server(kind, function):
        return "declared"
    # With several functions, no one score is known to judge the answer.
    return "by_value" if is_only and kind not in SCORERS else "none"


def _is_judging_server(kind: str, function: RewardFunctionConfig) -> bool:
    """Return whether an HTTP reward's score is a verdict: by a threshold, or by the choices CORRECT and INCORRECT."""
    if kind not in ("judge", "remote"):
        return False
    kwargs = function.kwargs
    has_own_scores = kwargs.get("choices") is not None or kwargs.get("scale") is not None
    return kwargs.get("correct_from") is not None or (kind == "judge" and not has_own_scores)
