"""The buffer between sampling and training: prompts are drawn until enough groups pass the filter."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil

import numpy as np

from megarl.config import Recipe
from megarl.data.batch import TokenBatch
from megarl.rollout.batch import RLBatch
from megarl.rollout.dynamic_sampling import passes_filter, refuse_unjudged, starved_text
from megarl.rollout.groups import Draw, sample_groups
from megarl.rollout.sources import Source, mixture_of
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
    "rollout/attempts": ("count", "batches of prompts that were drawn to fill the step"),
    "environment/SOURCE/epoch": ("epochs", "passes over a source's training data so far, in a mixture"),
    "data/epoch": ("epochs", "passes over the training data so far"),
    "rollout/kept": ("share", "groups that passed algorithm.dynamic_sampling"),
    "time/rollout_late_rewards_seconds": (
        "seconds",
        "from the last completion of a batch until its rewards are there and, where it fills the step, colocated "
        "engines asleep",
    ),
}
"""Names, units and meanings, for `tracking.table`."""


class Buffer:
    """Draws prompts, samples groups and keeps those that pass the filter; surplus groups wait in `state`.

    `sampled` are all trajectories that were sampled for the newest step, its groups numbered on, batch by batch.
    `on_sampled` runs beside the last rewards of a step for which nothing more is sampled.
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
        """The groups that a step is trained on, in the order in which they were drawn.

        `weight_version` is that of the weights that the step trains, its number too: the temperature is that of the
        schedule then. `engine_version` is that of the engines, unless given the same; here it must be, and all groups
        that are sampled now are complete before it changes.

        Raises MegarlError if `algorithm.max_attempts` batches do not fill a step, AbandonedError where the run is to
        stop: `state.forget_step` then brings back what waited.
        """
        state, algorithm = self._state, self._recipe.algorithm
        state.begin_step()
        self.sampled = []
        self._num_batches = self._num_passed = 0
        self._late_seconds = 0.0
        while len(state.waiting) < num_groups:
            if self._num_batches == algorithm.max_attempts:
                found = f"{self._num_batches} batches of {self._batch_size} prompts gave {len(state.waiting)} of "
                raise MegarlError(starved_text(algorithm, f"{found}{num_groups} groups", in_groups(self.sampled)))
            passing = [g for g in await self._draw(weight_version) if passes_filter(g, algorithm)]
            self._num_passed += len(passing)
            state.waiting = state.waiting + passing
        taken, state.waiting = state.waiting[:num_groups], state.waiting[num_groups:]
        return [[replace(t, group=number) for t in group] for number, group in enumerate(taken)]

    async def aclose(self) -> None:
        """Give up what is under way: here nothing, between two steps."""

    def _next_problem(self) -> Problem:
        """Draw the next problem."""
        problem, self._state.positions = self._mixture.draw(self._state.positions)
        return problem

    def _observe(self, group: Group) -> None:
        """Give the curriculum the share of a complete group that is right.

        Raises MegarlError where the recipe needs verdicts and the group has none.
        """
        source = self._sources[group[0].problem.source]
        refuse_unjudged(group, source.recipe)
        judged = [bool(t.reward.answer_correct) for t in group if t.reward is not None]
        if judged:
            positions, problem = self._state.positions, group[0].problem
            self._state.positions = self._mixture.observe(positions, problem, sum(judged) / len(judged))

    def _seed(self, draw: int, problem: Problem) -> str:
        """The seed of the attempts at a problem of a draw; sources of a mixture do not share it."""
        seed = f"{self._recipe.seed} {draw}"
        return f"{seed} {problem.source}" if self._recipe.mixture else seed

    async def _draw(self, step: int) -> list[Group]:
        """The groups of the next batch of prompts."""
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
        first_group = self._num_batches * self._batch_size
        self.sampled += [replace(t, group=t.group + first_group) for t in trajectories]
        self._num_batches += 1
        groups = in_groups(trajectories)
        for group in groups:
            self._observe(group)
        return groups

    async def _note_sampled(self) -> None:
        """All of a batch is sampled, if not scored."""
        self._sampled_at = time.monotonic()
        # With a filter another batch may be needed, of the same weights.
        if self.on_sampled is not None and self._recipe.algorithm.dynamic_sampling is None:
            await self.on_sampled()

    def _position_metrics(self) -> dict[str, float]:
        """Epochs and curricula of the sources; with names of theirs in a mixture, as `environment_metrics`."""
        positions, is_mixture = self._state.positions, bool(self._recipe.mixture)
        epochs = self._mixture.epochs(positions)
        metrics = {f"environment/{name}/epoch" if is_mixture else "data/epoch": value for name, value in epochs.items()}
        for name, of_source in self._mixture.metrics(positions).items():
            prefix = f"environment/{name}/" if is_mixture else ""
            metrics |= {f"{prefix}curriculum/{key}": value for key, value in of_source.items()}
        return metrics

    def metrics(self) -> dict[str, float]:
        """Of the newest step: METRICS.

        With a curriculum `curriculum/NAME`, those of `data.mixture.Mixture.metrics`; in a mixture
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
        """The groups, with the trainer's `old_logprobs` where needed. Call it before the step's update.

        Trajectories that wait for a later step get theirs now, while the trainer has the weights that sampled them.
        Fresh ones that one update trains on need none: their ratio starts at that update's own pass. With
        algorithm.entropy_top_share all get their `entropies`. `forward` computes log-probs, float32 [tokens], or with
        that share [2, tokens], log-probs and entropies; it is called at most once.
        """
        taken, self._state.waiting = await self._with_old_logprobs(groups, self._state.waiting, forward)
        return taken

    async def _with_old_logprobs(
        self,
        groups: Sequence[Group],
        waiting: Sequence[Group],
        forward: Callable[[TokenBatch], Awaitable[np.ndarray]],
    ) -> tuple[list[Group], list[Group]]:
        """As `add_old_logprobs`: a step's groups, and those that wait for a later one."""
        if self._recipe.algorithm.old_logprobs == "rollout":
            return list(groups), list(waiting)
        everything = in_one([*groups, *waiting])
        first = 0 if self._needs_old_logprobs else sum(len(group) for group in groups)
        lacking = [number >= first and lacks_old_logprobs(one) for number, one in enumerate(everything)]
        wanting = [self._needs_entropies and lacks_entropies(one) for one in everything]
        if asked := [place for place, wanted in enumerate(zip(lacking, wanting, strict=True)) if any(wanted)]:
            batch = RLBatch.from_groups([[everything[place] for place in asked]])
            found = [iter(np.split(values, batch.cu_seqlens[1:-1])) for values in np.atleast_2d(await forward(batch))]
            for place in asked:
                logprobs, *entropies = (list(islice(values, len(everything[place].segments))) for values in found)
                if lacking[place]:
                    everything[place] = with_old_logprobs(everything[place], logprobs)
                if wanting[place]:
                    everything[place] = with_entropies(everything[place], *entropies)
        completed = iter(everything)
        taken, waited = ([[next(completed) for _ in group] for group in some] for some in (groups, waiting))
        return taken, waited

    @property
    def _needs_old_logprobs(self) -> bool:
        """Whether the trainer's log-probs of all that is trained on are needed before the first update."""
        if self._recipe.loop == "distillation":
            return self._recipe.has_advantages
        algorithm = self._recipe.algorithm
        is_kl_before = algorithm.kl_coefficient > 0 and algorithm.kl_placement != "loss"
        return self._recipe.train.num_updates > 1 or algorithm.importance_sampling is not None or is_kl_before

    @property
    def _needs_entropies(self) -> bool:
        """Whether the trainer's entropies say which tokens learn from the reward."""
        return self._recipe.algorithm.entropy_top_share is not None
