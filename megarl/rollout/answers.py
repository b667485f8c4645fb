"""Verdicts of a source's answers in a run: accuracy is measured until a reward shows that there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.config import Recipe
from megarl.config.judges import REMEDY, Judging, judges_answers
from megarl.types import Trajectory

REMEDY_TEXT = f"{REMEDY[0].upper()}{REMEDY[1:]}"


@dataclass(slots=True)
class Answers:
    """How the answers of a source are judged. `has_ended` is True once an attempt came without a verdict.

    From then on no attempt of the source has a verdict, so that no later step is measured by rewards that happen to be
    0 or 1. Only `by_value` can end.
    """

    judging: Judging = "declared"
    source: str = ""
    tell_once: Callable[[str, str], object] = lambda kind, text: None
    has_ended: bool = False

    def settle(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory, without a verdict where the source has none."""
        reward = trajectory.reward
        if reward is None or self.judging != "by_value":
            return trajectory
        if reward.answer_correct is None and not self.has_ended:
            self.has_ended = True
            self.tell_once(
                f"{self.source}: unjudged",
                f"{self.source}: no accuracy, pass_at_K or majority_at_K is logged from now on (reward/unjudged), "
                f"because a reward of {reward.score:g} came without a verdict; 1 and 0 are verdicts where one function "
                f"or the environment gives the reward. {REMEDY_TEXT}, or give answer_correct in the environment's last "
                "step.",
            )
        return replace(trajectory, reward=replace(reward, answer_correct=None)) if self.has_ended else trajectory


def unjudged_text(recipe: Recipe, source: str) -> str | None:
    """The message at the start of a source whose answers nothing judges; None where something may."""
    if judges_answers(recipe) != "none":
        return None
    is_filtered = recipe.loop == "rl" and recipe.algorithm.dynamic_sampling is not None
    filtered = "; algorithm.dynamic_sampling compares the rewards of a group" if is_filtered else ""
    return (
        f"{source}: no accuracy, pass_at_K or majority_at_K is logged, because no reward function judges the "
        f"answer{filtered}. {REMEDY_TEXT}."
    )


def had_ended(rows: Iterable[Mapping[str, Any]], source: str, sets: Iterable[str], *, is_mixture: bool) -> bool:
    """Whether the logged metrics of a run's earlier steps, one mapping a step, show a source without verdicts."""
    of_training = f"environment/{source}/reward/unjudged" if is_mixture else "reward/unjudged"
    names = (of_training, *(f"val/{name}/unjudged" for name in sets))
    return any(name in row for row in rows for name in names)
