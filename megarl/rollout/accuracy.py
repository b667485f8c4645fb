"""Right-or-wrong verdicts on answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.config import Recipe
from megarl.config.judges import REMEDY, find_recipe_judging
from megarl.types import Judging, Trajectory

REMEDY_TEXT = f"{REMEDY[0].upper()}{REMEDY[1:]}"


@dataclass(slots=True)
class Answers:
    """Verdicts (right or wrong) on the answers to one source's problems.

    With `judging` = `declared`, every answer has a verdict. With `by_value`, reward 1 means right and 0 wrong. Any
    other reward gives no verdict, and sets `has_unjudged`. From then on `drop_biased_verdict` drops all verdicts of
    the source: accuracy would cover only answers with a reward of exactly 0 or 1.
    """

    judging: Judging = "declared"
    source: str = ""
    notify_once: Callable[[str, str], object] = lambda kind, text: None
    has_unjudged: bool = False

    def drop_biased_verdict(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory, without its verdict if this or an earlier answer of the source had none."""
        reward = trajectory.reward
        if reward is None or self.judging != "by_value":
            return trajectory
        if reward.answer_correct is None and not self.has_unjudged:
            self.has_unjudged = True
            self.notify_once(
                f"{self.source}: unjudged",
                f"{self.source}: no accuracy, pass_at_K or majority_at_K is logged from now on (reward/unjudged), "
                f"because a reward of {reward.score:g} came without a verdict; 1 and 0 are verdicts where one function "
                f"or the environment gives the reward. {REMEDY_TEXT}, or set answer_correct in the environment's last "
                "step.",
            )
        return replace(trajectory, reward=replace(reward, answer_correct=None)) if self.has_unjudged else trajectory


def unjudged_text(recipe: Recipe, source: str) -> str | None:
    """Return a notice if no reward function judges a source's answers as right or wrong; otherwise None."""
    if find_recipe_judging(recipe) != "none":
        return None
    is_filtered = recipe.trains_rewards and recipe.algorithm.dynamic_sampling is not None
    filter_text = "; algorithm.dynamic_sampling therefore compares the rewards of a group" if is_filtered else ""
    return (
        f"{source}: no accuracy, pass_at_K or majority_at_K is logged, because no reward function judges the "
        f"answer{filter_text}. {REMEDY_TEXT}."
    )


def had_unjudged_answers(
    metrics_by_step: Iterable[Mapping[str, Any]], source: str, set_names: Iterable[str], *, is_mixture: bool
) -> bool:
    """Return whether an earlier step of the run logged an answer of this source without a verdict.

    `metrics_by_step` has each step's metrics by name. `set_names` are the source's validation sets.
    """
    # In a mixture, this metric's name contains the source.
    training_name = f"environment/{source}/reward/unjudged" if is_mixture else "reward/unjudged"
    metric_names = (training_name, *(f"val/{name}/unjudged" for name in set_names))
    return any(name in step_metrics for step_metrics in metrics_by_step for name in metric_names)
