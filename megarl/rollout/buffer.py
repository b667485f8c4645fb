"""The buffer between sampling and training: prompts are drawn until enough groups pass the filter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from megarl.config import Recipe
from megarl.data.batch import TokenBatch
from megarl.data.sampler import DataOrder
from megarl.rollout.batch import RLBatch
from megarl.rollout.groups import GroupSampler
from megarl.rollout.state import Group, RLState, in_groups, in_one, lacks_old_logprobs, with_old_logprobs
from megarl.types import MegarlError, Problem, SamplingSettings, Trajectory


class Buffer:
    """Draws prompts, samples groups and keeps those that pass the filter; surplus groups wait in `state`.

    `sampled` are all trajectories that were sampled for the newest step, its groups numbered on, batch by batch.
    """

    def __init__(
        self,
        recipe: Recipe,
        problems: Sequence[Problem],
        sampler: GroupSampler,
        sampling: SamplingSettings,
        state: RLState,
    ) -> None:
        self.sampled: list[Trajectory] = []
        self._recipe, self._problems, self._state = recipe, problems, state
        self._sampler, self._sampling = sampler, sampling
        self._num_batches = self._num_passed = 0
        drawn = recipe.train.prompts_per_step
        if recipe.algorithm.dynamic_sampling:
            drawn = ceil(drawn * recipe.algorithm.oversampling)
        self._order = DataOrder(len(problems), drawn, recipe.seed, recipe.data.shuffle)

    async def take(self, num_groups: int, weight_version: int) -> list[Group]:
        """The groups that a step is trained on, in the order in which they were drawn.

        `weight_version` is that of the engines; all groups that are sampled now are complete before it changes.
        It is the step's number too: the temperature is that of the schedule then.

        Raises MegarlError if `algorithm.max_attempts` batches do not fill a step, AbandonedError where the run is to
        stop: `state.forget_step` then brings back what waited.
        """
        state, algorithm = self._state, self._recipe.algorithm
        state.begin_step()
        self._set_temperature(weight_version)
        self.sampled = []
        self._num_batches = self._num_passed = 0
        while len(state.waiting) < num_groups:
            if self._num_batches == algorithm.max_attempts:
                raise MegarlError(
                    f"{self._num_batches} batches of {self._order.batch_size} prompts gave {len(state.waiting)} of "
                    f"{num_groups} groups whose accuracy is within algorithm.dynamic_sampling "
                    f"{algorithm.dynamic_sampling}. Use problems of another difficulty, or raise "
                    "algorithm.max_attempts or train.samples_per_prompt."
                )
            passing = [g for g in await self._draw() if passes_filter(g, algorithm.dynamic_sampling)]
            self._num_passed += len(passing)
            state.waiting = state.waiting + passing
        taken, state.waiting = state.waiting[:num_groups], state.waiting[num_groups:]
        return [[replace(t, group=number) for t in group] for number, group in enumerate(taken)]

    async def close(self) -> None:
        """Give up what is under way: here nothing, between two steps."""

    def _set_temperature(self, step: int) -> None:
        """Sample from now on at the temperature of this step."""
        temperature = self._recipe.rollout.sampling.temperature_at(step, self._recipe.train.steps)
        self._sampling = replace(self._sampling, temperature=temperature)

    async def _draw(self) -> list[Group]:
        """The groups of the next batch of prompts."""
        trajectories = await self._sampler.sample(
            [self._problems[index] for index in self._order.batch(self._state.drawn)],
            self._sampling,
            samples_per_prompt=self._recipe.train.samples_per_prompt,
            seed=f"{self._recipe.seed} {self._state.drawn + 1}",
        )
        first_group = self._num_batches * self._order.batch_size
        self.sampled += [replace(t, group=t.group + first_group) for t in trajectories]
        self._num_batches += 1
        self._state.drawn += 1
        return in_groups(trajectories)

    def metrics(self) -> dict[str, float]:
        """Of the newest step, where groups are filtered.

        `rollout/attempts`: batches of prompts that were drawn; `rollout/kept`: the share of drawn groups that passed.
        """
        if self._recipe.algorithm.dynamic_sampling is None:
            return {}
        num_groups = max(self._num_batches * self._order.batch_size, 1)
        return {"rollout/attempts": self._num_batches, "rollout/kept": self._num_passed / num_groups}

    async def add_old_logprobs(
        self, groups: Sequence[Group], forward: Callable[[TokenBatch], Awaitable[np.ndarray]]
    ) -> list[Group]:
        """The groups, with the trainer's `old_logprobs` where needed. Call it before the step's update.

        Trajectories that wait for a later step get theirs now, while the trainer has the weights that sampled them.
        Fresh ones that one update trains on need none: their ratio starts at that update's own pass. `forward` computes
        log-probs, float32 [tokens]; it is called at most once.
        """
        if self._recipe.algorithm.old_logprobs == "rollout":
            return list(groups)
        everything = in_one([*groups, *self._state.waiting])
        first = 0 if self._needs_old_logprobs else sum(len(group) for group in groups)
        lacking = [place for place in range(first, len(everything)) if lacks_old_logprobs(everything[place])]
        if lacking:
            batch = RLBatch.from_groups([[everything[place] for place in lacking]])
            found = iter(np.split(await forward(batch), batch.cu_seqlens[1:-1]))
            for place in lacking:
                everything[place] = with_old_logprobs(everything[place], found)
        completed = iter(everything)
        taken = [[next(completed) for _ in group] for group in groups]
        self._state.waiting = [[next(completed) for _ in group] for group in self._state.waiting]
        return taken

    @property
    def _needs_old_logprobs(self) -> bool:
        """Whether the trainer's log-probs of all that is trained on are needed before the first update."""
        algorithm = self._recipe.algorithm
        is_kl_before = algorithm.kl_coefficient > 0 and algorithm.kl_placement != "loss"
        return self._recipe.train.num_updates > 1 or algorithm.importance_sampling is not None or is_kl_before


def passes_filter(group: Group, dynamic_sampling: tuple[float, float] | None) -> bool:
    """Whether a group's accuracy is inside the open interval; True without one."""
    if dynamic_sampling is None:
        return True
    low, high = dynamic_sampling
    rewards = [t.reward for t in group if t.reward is not None]
    return low < sum(reward.answer_correct for reward in rewards) / len(group) < high
