"""Verdicts (right or wrong) on a source's answers. Accuracy is measured until an answer comes without a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.config import Recipe
from megarl.config.judges import REMEDY, Judging, judges_answers
from megarl.types import Trajectory

REMEDY_TEXT = f"{REMEDY[0].upper()}{REMEDY[1:]}"
"""`REMEDY` as the beginning of a sentence."""


@dataclass(slots=True)
class Answers:
    """How the answers of a source are judged. `has_ended` becomes True at the first attempt without a verdict.

    Afterwards all verdicts of the source are removed. Otherwise later steps would measure accuracy only on rewards
    happening to be 0 or 1. This applies only to `judging` = by_value, the mode reading verdicts from rewards of 0 and
    1.
    """

    judging: Judging = "declared"
    source: str = ""
    notify_once: Callable[[str, str], object] = lambda kind, text: None
    has_ended: bool = False

    def settle(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory, without its verdict if the source no longer has verdicts."""
        reward = trajectory.reward
        # Declared verdicts come with every answer; only verdicts derived from rewards can stop.
        if reward is None or self.judging != "by_value":
            return trajectory
        if reward.answer_correct is None and not self.has_ended:
            self.has_ended = True
            self.notify_once(
                f"{self.source}: unjudged",
                f"{self.source}: no accuracy, pass_at_K or majority_at_K is logged from now on (reward/unjudged), "
                f"because a reward of {reward.score:g} came without a verdict; 1 and 0 are verdicts where one function "
                f"or the environment gives the reward. {REMEDY_TEXT}, or set answer_correct in the environment's last "
                "step.",
            )
        return replace(trajectory, reward=replace(reward, answer_correct=None)) if self.has_ended else trajectory


def unjudged_text(recipe: Recipe, source: str) -> str | None:
    """Return the start-up message for a source whose answers nothing judges; None for other sources."""
    if judges_answers(recipe) != "none":
        return None
    is_filtered = recipe.loop == "rl" and recipe.algorithm.dynamic_sampling is not None
    filtered = "; algorithm.dynamic_sampling compares the rewards of a group" if is_filtered else ""
    return (
        f"{source}: no accuracy, pass_at_K or majority_at_K is logged, because no reward function judges the "
        f"answer{filtered}. {REMEDY_TEXT}."
    )


def had_ended(rows: Iterable[Mapping[str, Any]], source: str, sets: Iterable[str], *, is_mixture: bool) -> bool:
    """Return whether a run's logged metrics (one mapping per step) show a source without verdicts."""
    # A mixture logs this metric per source.
    of_training = f"environment/{source}/reward/unjudged" if is_mixture else "reward/unjudged"
    names = (of_training, *(f"val/{name}/unjudged" for name in sets))
    return any(name in row for row in rows for name in names)
