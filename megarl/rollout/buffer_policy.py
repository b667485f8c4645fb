"""How many groups to sample, which groups a step takes, and when a group is too old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from megarl.config import AlgorithmConfig, Recipe
from megarl.config.judges import REMEDY, list_accuracy_needs
from megarl.rollout.state import RLState, draw_of
from megarl.types import Group, MegarlError, Reward, Trajectory


@dataclass(frozen=True, slots=True)
class BufferPolicy:
    """Number of steps to sample ahead of the trainer, and how to treat stragglers. Default: synchronous training.

    Stragglers are groups still in flight when a step has enough complete groups. `finish`: the step waits for them.
    `continue`: they pause while the engines do, and a later step trains on them. `abort`: they are dropped.
    """

    stragglers: Literal["finish", "continue", "abort"] = "finish"
    steps_ahead: int = 0
    """Later steps to sample for while the current step trains. Above 0, groups are used in the order of drawing."""

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> BufferPolicy:
        if recipe.rollout.is_paced:
            return cls("continue", recipe.rollout.staleness_bound)
        policies: dict[str, BufferPolicy] = {"wait": cls("finish"), "park": cls("continue"), "abort": cls("abort")}
        return policies[recipe.rollout.stragglers]

    @property
    def is_synchronous(self) -> bool:
        return self.stragglers == "finish"


@dataclass(frozen=True, slots=True)
class StepDemand:
    """A training step's demand for groups: how many, and how old their tokens may be.

    `step` is also the version of the weights to train. The engines may still have an earlier `engine_version`.
    """

    policy: BufferPolicy
    recipe: Recipe
    num_groups: int
    step: int
    engine_version: int

    @property
    def max_live_groups(self) -> int:
        """Return the maximum number of groups, in flight or complete, while the step waits.

        Engines of version v may start groups for steps up to v + `rollout.staleness_bound`. Groups sampled ahead are
        used in order, so only the number of earlier groups matters. With P groups per step, step n allows P * (1 +
        staleness_bound - (n - v)) groups, including its own. This is AReaL's rule (arXiv 2505.24298, eq. 3) with the
        engines' version, which lags with `rollout.sync_every` above 1.
        """
        if self.policy.is_synchronous and self.recipe.algorithm.dynamic_sampling is None:
            # Without a filter, surplus groups would only wait and become stale.
            return self.num_groups
        if not self.policy.steps_ahead:
            return ceil(self.num_groups * self.recipe.algorithm.oversampling)
        # The further the engines are behind the trainer, the fewer steps may be sampled ahead.
        lag = self.step - self.engine_version
        # Sample nothing for steps after the run's last one.
        steps_left = self.recipe.train.steps - self.step + 1
        return self.num_groups * min(1 + self.policy.steps_ahead - lag, steps_left)

    def choose_groups(self, state: RLState) -> list[Group] | None:
        """Return the groups for a step, in the order in which their prompts were drawn.

        None: too few groups are complete, or the step waits for one in flight.
        """
        if self.policy.is_synchronous or self.policy.steps_ahead:
            return self._choose_first_drawn(state)
        return self._choose_first_complete(state)

    def _choose_first_drawn(self, state: RLState) -> list[Group] | None:
        """Return the waiting groups drawn first. None: too few of them were drawn before all groups in flight.

        In a synchronous step no group may be in flight.
        """
        if self.policy.is_synchronous and state.started:
            return None
        first_in_flight = min(state.started, default=None)
        next_groups = [g for g in state.waiting if first_in_flight is None or draw_of(g) < first_in_flight]
        return sorted(next_groups, key=draw_of)[: self.num_groups] if len(next_groups) >= self.num_groups else None

    def _choose_first_complete(self, state: RLState) -> list[Group] | None:
        """Return complete groups, those at the staleness limit first.

        With rollout.on_stale = wait, the step waits for groups in flight that the next step could no longer use.
        """
        if len(state.waiting) < self.num_groups:
            return None
        oldest_allowed = self._oldest_allowed_version
        waits_for_stale = self.policy.stragglers == "continue" and self.recipe.rollout.on_stale == "wait"
        if waits_for_stale and any(
            group.oldest_version(self.engine_version) <= oldest_allowed for group in state.started.values()
        ):
            return None
        # False sorts before True, so groups at the limit come first. The sort is stable: ties keep their order.
        by_staleness = sorted(state.waiting, key=lambda group: self._oldest_version(group) > oldest_allowed)
        return sorted(by_staleness[: self.num_groups], key=draw_of)

    def stale_draws(self, state: RLState) -> set[int]:
        """Return the draw numbers of groups, in flight or waiting, with tokens older than the staleness limit."""
        oldest_allowed = self._oldest_allowed_version
        started_draws = {
            g.draw for g in state.started.values() if g.oldest_version(self.engine_version) < oldest_allowed
        }
        return started_draws | {
            draw_of(group) for group in state.waiting if self._oldest_version(group) < oldest_allowed
        }

    @property
    def _oldest_allowed_version(self) -> int:
        """Oldest weight version that may have sampled a token of this step."""
        return self.step - self.recipe.rollout.staleness_bound

    def _oldest_version(self, group: Group) -> int:
        return min([self.step, *(t.oldest_version for t in group if t.num_sampled)])


def passes_filter(group: Sequence[Trajectory], algorithm: AlgorithmConfig) -> bool:
    """Return whether to train on a group. Always True without `algorithm.dynamic_sampling` = (low, high).

    By accuracy: the share of right answers must lie strictly between `low` and `high`. By reward: the largest reward
    must exceed the smallest by more than `low`. `algorithm.dynamic_sampling_metric` selects one; its default is
    accuracy if all answers have a verdict. A group without a scored attempt is never used.
    """
    if algorithm.dynamic_sampling is None:
        return True
    low, high = algorithm.dynamic_sampling
    rewards = [t.reward for t in group if t.reward is not None]
    if not rewards:
        return False
    if (algorithm.dynamic_sampling_metric or _default_metric(rewards)) == "reward":
        scores = [reward.score for reward in rewards]
        return max(scores) - min(scores) > low
    return low < sum(bool(reward.answer_correct) for reward in rewards) / len(rewards) < high


def _default_metric(rewards: Sequence[Reward]) -> str:
    return "accuracy" if all(reward.answer_correct is not None for reward in rewards) else "reward"


def refuse_unjudged(group: Sequence[Trajectory], recipe: Recipe) -> None:
    """Raise MegarlError if an answer has no right-or-wrong verdict and the recipe's algorithm needs one."""
    if all(t.reward is None or t.reward.answer_correct is not None for t in group):
        return
    if needs := list_accuracy_needs(recipe):
        raise MegarlError(
            f"{'; '.join(needs)}: every answer needs a verdict (right or wrong), but one has only a reward, and the "
            f"reward is neither 0 nor 1; {REMEDY}, or set answer_correct in the environment's last step"
        )


def starved_message(algorithm: AlgorithmConfig, summary: str, groups: Sequence[Sequence[Trajectory]]) -> str:
    """Return the error message for a step with too few groups passing the filter.

    `summary` says how many prompts were sampled and how many groups passed. `groups` are the groups sampled last.
    """
    low, high = algorithm.dynamic_sampling or (0.0, 1.0)
    metric = algorithm.dynamic_sampling_metric or _default_metric([t.reward for g in groups for t in g if t.reward])
    if metric == "accuracy":
        return (
            f"{summary} whose accuracy is within algorithm.dynamic_sampling ({low:g}, {high:g}). Use problems of "
            "another difficulty, or raise algorithm.max_attempts or train.samples_per_prompt."
        )
    equal_reward_groups = [g for g in groups if len({t.reward.score for t in g if t.reward is not None}) < 2]
    return (
        f"{summary} whose rewards differ by more than {low:g} (algorithm.dynamic_sampling, by "
        f"algorithm.dynamic_sampling_metric = reward); in {len(equal_reward_groups)} of the last "
        f"{len(groups)} all rewards are equal. "
        "Use a reward that grades answers more finely, raise train.samples_per_prompt, "
        "rollout.sampling.temperature or algorithm.max_attempts, or lower the first number."
    )
