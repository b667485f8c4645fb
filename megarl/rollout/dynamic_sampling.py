"""Dynamic sampling: selects groups for training by their accuracy, or by the spread of their rewards."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config import AlgorithmConfig, Recipe
from megarl.config.judges import REMEDY, accuracy_needs
from megarl.types import MegarlError, Reward, Trajectory


def passes_filter(group: Sequence[Trajectory], algorithm: AlgorithmConfig) -> bool:
    """Return whether a group of trajectories is used for training. Always True without `algorithm.dynamic_sampling`.

    `algorithm.dynamic_sampling` is an open interval (low, high). By accuracy: the share of right answers must lie
    inside. By reward: the largest reward must exceed the smallest by more than `low`.
    `algorithm.dynamic_sampling_metric` selects one of the two. By default it is accuracy if all answers of the group
    have a verdict, otherwise reward. A group without any scored attempt is not used.
    """
    if algorithm.dynamic_sampling is None:
        return True
    low, high = algorithm.dynamic_sampling
    rewards = [t.reward for t in group if t.reward is not None]
    if not rewards:
        return False
    if (algorithm.dynamic_sampling_metric or _derived(rewards)) == "reward":
        scores = [reward.score for reward in rewards]
        return max(scores) - min(scores) > low
    return low < sum(bool(reward.answer_correct) for reward in rewards) / len(rewards) < high


def _derived(rewards: Sequence[Reward]) -> str:
    return "accuracy" if all(reward.answer_correct is not None for reward in rewards) else "reward"


def refuse_unjudged(group: Sequence[Trajectory], recipe: Recipe) -> None:
    """Raise MegarlError if an answer has no right-or-wrong verdict and the recipe's algorithm needs one."""
    if all(t.reward is None or t.reward.answer_correct is not None for t in group):
        return
    if needs := accuracy_needs(recipe):
        raise MegarlError(
            f"{'; '.join(needs)}: every answer needs a verdict (right or wrong), but a reward other than 0 and 1 came "
            f"without a verdict; {REMEDY}, or set answer_correct in the environment's last step"
        )


def starved_text(algorithm: AlgorithmConfig, found: str, groups: Sequence[Sequence[Trajectory]]) -> str:
    """Return the error message for a step that too few groups passed the filter for.

    `found` begins the message: how many prompts were sampled and how many groups passed. `groups` are the groups
    sampled last.
    """
    low, high = algorithm.dynamic_sampling or (0.0, 1.0)
    metric = algorithm.dynamic_sampling_metric or _derived([t.reward for g in groups for t in g if t.reward])
    if metric == "accuracy":
        return (
            f"{found} whose accuracy is within algorithm.dynamic_sampling ({low:g}, {high:g}). Use problems of another "
            "difficulty, or raise algorithm.max_attempts or train.samples_per_prompt."
        )
    flat = [g for g in groups if len({t.reward.score for t in g if t.reward is not None}) < 2]
    return (
        f"{found} whose rewards differ by more than {low:g} (algorithm.dynamic_sampling, by "
        f"algorithm.dynamic_sampling_metric = reward); in {len(flat)} of the last {len(groups)} all rewards are equal. "
        "Use a reward that grades answers more finely, raise train.samples_per_prompt, "
        "rollout.sampling.temperature or algorithm.max_attempts, or lower the first number."
    )
