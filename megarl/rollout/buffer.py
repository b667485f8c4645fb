"""The buffer between sampling and training: it draws prompts until enough groups pass the filter."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil

import numpy as np

from megarl.config import Recipe
from megarl.data.token_batch import TokenBatch
from megarl.rollout.dynamic_sampling import passes_filter, refuse_unjudged, starved_text
from megarl.rollout.groups import Draw, sample_groups
from megarl.rollout.rl_batch import RLBatch
from megarl.rollout.source import Source, mixture_of
from megarl.rollout.state import (
    Group,
    RLState,
    in_groups,
    in_one,
    lacks_entropies,
    lacks_old_logprobs,
    with_entropies,
    with_old_logprobs,
)
from megarl.types import MegarlError, Problem, Trajectory

METRICS = {
    "rollout/attempts": ("count", "batches of prompts drawn to fill the step"),
    "environment/SOURCE/epoch": ("epochs", "passes over a source's training data so far, in a mixture"),
    "data/epoch": ("epochs", "passes over the training data so far"),
    "rollout/kept": ("share", "groups passing algorithm.dynamic_sampling"),
    "time/rollout_late_rewards_seconds": (
        "seconds",
        "from a batch's last completion until all its rewards are computed; if the batch fills the step, also until "
        "colocated engines are asleep",
    ),
}
"""Names, units and meanings, for `tracking.table`."""


class Buffer:
    """Draws prompts, samples their groups, and keeps those passing the filter. Surplus groups wait in `state`.

    `sampled` holds all trajectories sampled for the last step. Their groups are numbered consecutively over its
    batches. `on_sampled` runs in the background of a step's last rewards, after its last completion.
    """

    on_sampled: Callable[[], Awaitable[None]] | None = None

    def __init__(
        self,
        recipe: Recipe,
        sources: Sequence[Source],
        state: RLState,
    ) -> None:
        self.sampled: list[Trajectory] = []
        self._recipe, self._state = recipe, state
        self._sources = {source.name: source for source in sources}
        self._mixture = mixture_of(sources, recipe.seed)
        self._num_batches = self._num_passed = 0
        self._sampled_at = self._late_seconds = 0.0
        self._batch_size = recipe.train.prompts_per_step
        if recipe.algorithm.dynamic_sampling:
            self._batch_size = ceil(self._batch_size * recipe.algorithm.oversampling)

    async def take(self, num_groups: int, weight_version: int, engine_version: int | None = None) -> list[Group]:
        """Return the groups to train a step on, in the order of drawing.

        `weight_version` is the version of the weights trained in this step, and also the number of the step; the
        temperature schedule uses it. `engine_version` is the version of the engines' weights and must be the same here:
        all groups sampled now complete before the next reshard.

        Raises MegarlError if `algorithm.max_attempts` batches do not fill the step. Raises AbandonedError if the run
        must stop; `state.forget_step` then restores the groups taken.
        """
        state, algorithm = self._state, self._recipe.algorithm
        state.begin_step()
        self.sampled = []
        self._num_batches = self._num_passed = 0
        self._late_seconds = 0.0
        while len(state.waiting) < num_groups:
            # Without a bound, a data set without learning signal would be sampled for ever.
            if self._num_batches == algorithm.max_attempts:
                found = f"{self._num_batches} batches of {self._batch_size} prompts gave {len(state.waiting)} of "
                raise MegarlError(starved_text(algorithm, f"{found}{num_groups} groups", in_groups(self.sampled)))
            passing = [g for g in await self._draw(weight_version) if passes_filter(g, algorithm)]
            self._num_passed += len(passing)
            state.waiting = state.waiting + passing
        taken, state.waiting = state.waiting[:num_groups], state.waiting[num_groups:]
        return [[replace(t, group=number) for t in group] for number, group in enumerate(taken)]

    async def aclose(self) -> None:
        """Cancel everything in flight. Between two steps this buffer has nothing in flight."""

    def _next_problem(self) -> Problem:
        """Draw the next problem."""
        problem, self._state.positions = self._mixture.draw(self._state.positions)
        return problem

    def _observe(self, group: Group) -> None:
        """Report a complete group's share of right answers to the curriculum.

        Raises MegarlError if the recipe needs verdicts and the group has none.
        """
        source = self._sources[group[0].problem.source]
        refuse_unjudged(group, source.recipe)
        # Failed attempts have no reward; they say nothing about the problem's difficulty.
        judged = [bool(t.reward.answer_correct) for t in group if t.reward is not None]
        if judged:
            positions, problem = self._state.positions, group[0].problem
            self._state.positions = self._mixture.observe(positions, problem, sum(judged) / len(judged))

    def _seed(self, draw: int, problem: Problem) -> str:
        """Return the seed of the attempts at a problem. Sources of a mixture get different seeds."""
        seed = f"{self._recipe.seed} {draw}"
        return f"{seed} {problem.source}" if self._recipe.mixture else seed

    async def _draw(self, step: int) -> list[Group]:
        """Sample the groups of the next batch of prompts."""
        problems = [self._next_problem() for _ in range(self._batch_size)]
        self._state.drawn += 1
        draw = self._state.drawn
        trajectories = await sample_groups(
            [
                Draw(source.sampler, problem, source.sampling(step), self._seed(draw, problem))
                for problem in problems
                for source in [self._sources[problem.source]]
            ],
            self._recipe.train.samples_per_prompt,
            self._note_sampled,
        )
        self._late_seconds += time.monotonic() - self._sampled_at
        # Groups are numbered from 0 in each batch; metrics need distinct numbers over the step.
        first_group = self._num_batches * self._batch_size
        self.sampled += [replace(t, group=t.group + first_group) for t in trajectories]
        self._num_batches += 1
        groups = in_groups(trajectories)
        for group in groups:
            self._observe(group)
        return groups

    async def _note_sampled(self) -> None:
        """Note the time: a batch is fully sampled, though not fully scored."""
        self._sampled_at = time.monotonic()
        # With a filter, another batch may have to be sampled with the same weights: keep the engines awake.
        if self.on_sampled is not None and self._recipe.algorithm.dynamic_sampling is None:
            await self.on_sampled()

    def _position_metrics(self) -> dict[str, float]:
        """Return epochs and curriculum metrics of the sources. In a mixture their names contain the source."""
        positions, is_mixture = self._state.positions, bool(self._recipe.mixture)
        epochs = self._mixture.epochs(positions)
        metrics = {f"environment/{name}/epoch" if is_mixture else "data/epoch": value for name, value in epochs.items()}
        for name, of_source in self._mixture.metrics(positions).items():
            prefix = f"environment/{name}/" if is_mixture else ""
            metrics |= {f"{prefix}curriculum/{key}": value for key, value in of_source.items()}
        return metrics

    def metrics(self) -> dict[str, float]:
        """Return METRICS of the last step.

        A curriculum adds `curriculum/NAME`, from `data.mixture.Mixture.metrics`; in a mixture
        `environment/SOURCE/curriculum/NAME`.
        """
        found = self._position_metrics() | {"time/rollout_late_rewards_seconds": self._late_seconds}
        if self._recipe.algorithm.dynamic_sampling is None:
            return found
        num_groups = max(self._num_batches * self._batch_size, 1)
        return found | {"rollout/attempts": self._num_batches, "rollout/kept": self._num_passed / num_groups}

    async def add_old_logprobs(
        self, groups: Sequence[Group], forward: Callable[[TokenBatch], Awaitable[np.ndarray]]
    ) -> list[Group]:
        """Return the groups with the trainer's `old_logprobs` where needed. Call it before the step's update.

        Trajectories waiting for a later step get theirs now, while the trainer still has the weights used to sample
        them. Fresh trajectories trained in a single update need none: their ratio starts at the log-probs of the
        update's own pass. With algorithm.entropy_top_share all get `entropies`.

        `forward` computes log-probs, float32 [tokens]; with entropy_top_share log-probs and entropies, [2, tokens]. It
        is called at most once.
        """
        taken, self._state.waiting = await self._with_old_logprobs(groups, self._state.waiting, forward)
        return taken

    async def _with_old_logprobs(
        self,
        groups: Sequence[Group],
        waiting: Sequence[Group],
        forward: Callable[[TokenBatch], Awaitable[np.ndarray]],
    ) -> tuple[list[Group], list[Group]]:
        """Return a step's groups, and the waiting ones, with log-probs as in `add_old_logprobs`."""
        if self._recipe.algorithm.old_logprobs == "rollout":
            return list(groups), list(waiting)
        everything = in_one([*groups, *waiting])
        # Without that need, only waiting trajectories get log-probs: the ones after the step's own.
        first = 0 if self._needs_old_logprobs else sum(len(group) for group in groups)
        lacking = [number >= first and lacks_old_logprobs(one) for number, one in enumerate(everything)]
        wanting = [self._needs_entropies and lacks_entropies(one) for one in everything]
        if asked := [place for place, wanted in enumerate(zip(lacking, wanting, strict=True)) if any(wanted)]:
            # One batch for all, because a forward pass is a call to every rank.
            batch = RLBatch.from_groups([[everything[place] for place in asked]])
            found = [iter(np.split(values, batch.cu_seqlens[1:-1])) for values in np.atleast_2d(await forward(batch))]
            for place in asked:
                logprobs, *entropies = (list(islice(values, len(everything[place].segments))) for values in found)
                if lacking[place]:
                    everything[place] = with_old_logprobs(everything[place], logprobs)
                if wanting[place]:
                    everything[place] = with_entropies(everything[place], *entropies)
        # `everything` was flat; restore the groups in the same order.
        completed = iter(everything)
        taken, waited = ([[next(completed) for _ in group] for group in some] for some in (groups, waiting))
        return taken, waited

    @property
    def _needs_old_logprobs(self) -> bool:
        """Whether the trainer's log-probs of all trained tokens are needed before the first update."""
        if self._recipe.loop == "distillation":
            return self._recipe.has_advantages
        algorithm = self._recipe.algorithm
        # A KL outside the loss is part of the advantages, computed before the first update.
        is_kl_before = algorithm.kl_coefficient > 0 and algorithm.kl_placement != "loss"
        return self._recipe.train.num_updates > 1 or algorithm.importance_sampling is not None or is_kl_before

    @property
    def _needs_entropies(self) -> bool:
        """Whether the trainer's entropies select the tokens of the policy loss."""
        return self._recipe.algorithm.entropy_top_share is not None
