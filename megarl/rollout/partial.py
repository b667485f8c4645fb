"""Partial rollouts: a step trains on the first groups that are complete, those of the stragglers come later."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from megarl.config import Recipe
from megarl.data.batch import TokenBatch
from megarl.rollout.buffer import Buffer
from megarl.rollout.dynamic_sampling import passes_filter, starved_text
from megarl.rollout.pool import BUDGET_SECONDS, AbandonedError
from megarl.rollout.recording import RecordedPool, StartedGroup
from megarl.rollout.sources import Source
from megarl.rollout.state import Group, RLState, in_one
from megarl.types import MegarlError, Trajectory

METRICS = {
    "partial/share": ("share", "trajectories with tokens of several weight versions"),
    "partial/kept_tokens": ("tokens", "tokens of earlier weight versions"),
    "staleness/span/mean": ("versions", "weight versions from a trajectory's oldest token to its newest, mean"),
    "staleness/span/max": ("versions", "weight versions from a trajectory's oldest token to its newest, the most"),
    "staleness/dropped": ("count", "groups that were given up for their age"),
    "staleness/waited_seconds": ("seconds", "how long only groups that may not grow older were waited for"),
    "rollout/aborted": ("count", "groups that were given up as surplus"),
    "rollout/in_flight": ("count", "groups that go on into the next step"),
    "rollout/ready": ("count", "complete groups that wait for a later step"),
    "rollout/drawn": ("count", "groups that were started since the run began"),
    "rollout/used": ("count", "groups that steps trained on since the run began"),
    "rollout/given_up": (
        "count",
        "groups that were dropped, aborted or filtered out since the run began; all others that were drawn are used, "
        "in flight or ready",
    ),
}
"""Names, units and meanings, for `tracking.table`."""

_LEAVE_SECONDS = 5.0


class PartialBuffer(Buffer):
    """Starts `algorithm.oversampling` times the groups of a step and gives out the first that are complete.

    The others go on: while the engines sleep their requests are parked and their environments run. Under
    `rollout.stragglers` abort they are given up instead. Each group is given out once, none later than
    `rollout.max_staleness` allows: the step waits for it, or drops it (`rollout.on_stale`).

    `state.started` are the groups under way, by the number of their prompt; a checkpoint has them as they are.
    """

    def __init__(self, recipe: Recipe, sources: Sequence[Source], state: RLState) -> None:
        super().__init__(recipe, sources, state)
        self._step = self._engine_version = 1
        self._num_groups = recipe.train.prompts_per_step
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._pools: dict[int, list[RecordedPool]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._completed = asyncio.Event()
        self._counts: dict[str, float] = {}
        self._collected: list[Group] = []
        """Complete groups since the newest step was given its own."""
        self._num_started = 0
        """Groups that were started since then."""

    async def take(self, num_groups: int, weight_version: int, engine_version: int | None = None) -> list[Group]:
        """The groups that a step is trained on, ordered by when their prompts were drawn.

        Raises MegarlError if `algorithm.max_attempts` times the groups of a step do not fill it, AbandonedError where
        the run is to stop, and the error of an attempt.
        """
        state = self._state
        self._step, self._num_groups = weight_version, num_groups
        self._engine_version = weight_version if engine_version is None else engine_version
        self._counts = {"staleness/dropped": 0.0, "staleness/waited_seconds": 0.0, "rollout/aborted": 0.0}
        state.give([])
        self._drop_stale()
        while True:
            self._collect()
            self._start_more(self._num_live)
            if (taken := self._chosen()) is not None:
                break
            self._refuse_starved()
            is_waited_for = len(state.waiting) >= num_groups
            began = time.monotonic()
            await self._wait_for_a_group()
            self._counts["staleness/waited_seconds"] += is_waited_for * (time.monotonic() - began)
            if any(source.sampler.is_abandoned() for source in self._sources.values()):
                raise AbandonedError
        # What `forget_step` goes back to has all that is drawn: nothing is sampled twice.
        state.give(taken)
        if self._recipe.rollout.stragglers == "abort":
            self._abort_all()
        self._measure(taken)
        return [[replace(t, group=number) for t in group] for number, group in enumerate(taken)]

    async def add_old_logprobs(
        self, groups: Sequence[Group], forward: Callable[[TokenBatch], Awaitable[np.ndarray]]
    ) -> list[Group]:
        """As `Buffer.add_old_logprobs`, of these groups alone.

        The old policy of a group that waits is the trainer's before the update that trains on it: no one's weights
        sampled all of its tokens.
        """
        # Groups that complete meanwhile join those that wait.
        taken, _ = await self._with_old_logprobs(groups, [], forward)
        return taken

    def metrics(self) -> dict[str, float]:
        """Of the newest step."""
        counts = self._counts | self._position_metrics()
        if self._recipe.algorithm.dynamic_sampling is not None:
            counts["rollout/kept"] = self._num_passed / max(self._num_batches, 1)
        return counts

    async def aclose(self) -> None:
        """Cancel all that is under way; an environment that does not heed it is left behind."""
        self._leave(list(self._tasks))
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=_LEAVE_SECONDS)

    @property
    def _num_live(self) -> int:
        """The groups, complete ones too, that there may be while the step's own are waited for."""
        return ceil(self._num_groups * self._recipe.algorithm.oversampling)

    def _start_more(self, num_live: int) -> None:
        """Go on with the groups of a checkpoint, and start as many as are missing to so many."""
        state = self._state
        for group in state.started.values():
            if group.draw not in self._tasks:
                self._start(group)
        while len(state.started) + len(state.waiting) < num_live and not self._has_drawn_enough:
            problem = self._next_problem()
            temperature = self._sources[problem.source].sampling(self._step).temperature
            group = StartedGroup(state.drawn, problem, temperature)
            state.started[group.draw] = group
            state.drawn += 1
            self._num_started += 1
            self._start(group)

    @property
    def _has_drawn_enough(self) -> bool:
        """Whether a step has drawn all prompts that it may draw to fill itself."""
        algorithm = self._recipe.algorithm
        return bool(algorithm.dynamic_sampling) and self._num_started >= algorithm.max_attempts * self._num_live

    def _refuse_starved(self) -> None:
        """Raise a MegarlError where no group is left that could fill the step."""
        state = self._state
        if self._has_drawn_enough and len(state.started) + len(state.waiting) < self._num_live:
            found = f"{self._num_started} prompts gave {len(state.waiting)} groups"
            raise MegarlError(starved_text(self._recipe.algorithm, found, self._collected))

    def _start(self, group: StartedGroup) -> None:
        self._pools[group.draw] = []
        task = self._tasks[group.draw] = asyncio.create_task(self._sample(group))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An attempt at a group has ended, in whatever way."""
        self._completed.set()

    async def _sample(self, group: StartedGroup) -> None:
        """Make the attempts at a group's problem that have not ended."""
        seed = self._seed(group.draw + 1, group.problem)
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._recipe.train.samples_per_prompt):
                if number not in group.finished:
                    tasks.create_task(self._attempt(group, number, seed))

    async def _attempt(self, group: StartedGroup, number: int, seed: str) -> None:
        source = self._sources[group.problem.source]
        pool = RecordedPool(source.sampler.pool, group.calls.setdefault(number, []))
        self._pools[group.draw].append(pool)
        sampling = replace(source.sampling(self._step), temperature=group.temperature)
        task = source.sampler.task(group.problem, group.draw, number, seed, sampling, prefix="draw ")
        trajectory = await source.sampler.attempt(task, pool)
        group.finish(replace(trajectory, restarts=trajectory.restarts + pool.is_restarted))

    async def _wait_for_a_group(self) -> None:
        """Wait until a group is complete or failed, but not for long: the run may be asked to stop."""
        self._completed.clear()
        if any(task.done() for task in self._tasks.values()):
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._completed.wait(), BUDGET_SECONDS)

    def _collect(self) -> None:
        """Move complete groups to those that wait, if they pass the filter. Raises the error of an attempt."""
        state, recipe = self._state, self._recipe
        for draw in [draw for draw, task in self._tasks.items() if task.done()]:
            try:
                self._tasks[draw].result()
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            del self._tasks[draw], self._pools[draw]
            finished = state.started.pop(draw).finished
            group = [finished[number] for number in range(recipe.train.samples_per_prompt)]
            self._collected.append(group)
            self._observe(group)
            if passes_filter(group, recipe.algorithm):
                state.waiting = [*state.waiting, group]
            else:
                state.given_up += 1

    def _chosen(self) -> list[Group] | None:
        """The step's groups, those first that may not grow older; None while some are missing."""
        rollout, state = self._recipe.rollout, self._state
        newest = self._step - rollout.staleness_bound
        waits = rollout.stragglers == "park" and rollout.on_stale == "wait"
        is_awaited = any(group.oldest_version(self._engine_version) <= newest for group in state.started.values())
        if len(state.waiting) < self._num_groups or (waits and is_awaited):
            return None
        by_age = sorted(state.waiting, key=lambda group: _oldest(group, self._step) > newest)
        return sorted(by_age[: self._num_groups], key=draw_of)

    def _drop_stale(self) -> None:
        """Give up the groups whose oldest token is older than the bound."""
        state, oldest = self._state, self._step - self._recipe.rollout.staleness_bound
        stale = [g.draw for g in state.started.values() if g.oldest_version(self._engine_version) < oldest]
        fresh = [group for group in state.waiting if _oldest(group, self._step) >= oldest]
        dropped = len(stale) + len(state.waiting) - len(fresh)
        self._counts["staleness/dropped"] += dropped
        state.given_up += dropped
        state.waiting = fresh
        self._leave(stale)
        for draw in stale:
            state.started.pop(draw)

    def _abort_all(self) -> None:
        """Give up the surplus: what is under way, and complete groups that the step does not train on."""
        state = self._state
        surplus = len(state.started) + len(state.waiting)
        self._counts["rollout/aborted"] += surplus
        state.given_up += surplus
        self._leave(list(self._tasks))
        state.started.clear()
        state.waiting = []

    def _measure(self, taken: Sequence[Group]) -> None:
        """Note what was sampled since the step before, and where all groups are."""
        state = self._state
        collected, self._collected = self._collected, []
        self._num_started = 0
        self.sampled = in_one(collected)
        self._num_batches = len(collected)
        self._num_passed = sum(passes_filter(group, self._recipe.algorithm) for group in collected)
        self._counts |= _metrics_of_taken(taken, self._step) | {
            "rollout/in_flight": float(len(state.started)),
            "rollout/ready": float(len(state.waiting)),
            "rollout/drawn": float(state.drawn),
            "rollout/used": float(state.used),
            "rollout/given_up": float(state.given_up),
        }

    def _leave(self, draws: Sequence[int]) -> None:
        """Cancel groups; their requests leave the engines."""
        for draw in draws:
            if (task := self._tasks.pop(draw, None)) is not None:
                for pool in self._pools.pop(draw):
                    pool.close()
                task.cancel()
                self._leaving.add(task)
                task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled():
            task.exception()  # it was given up: nobody waits for its error


def draw_of(group: Group) -> int:
    """The number of a waiting group's prompt among all that were drawn."""
    return group[0].group


def _oldest(group: Group, weight_version: int) -> int:
    return min([weight_version, *(t.oldest_version for t in group if t.num_sampled)])


def _metrics_of_taken(groups: Sequence[Group], weight_version: int) -> dict[str, float]:
    versions = [_versions(trajectory) for trajectory in in_one(groups) if trajectory.num_sampled]
    spans = [int(found.max() - found.min()) for found in versions]
    return {
        "partial/share": float(np.mean([span > 0 for span in spans])),
        "partial/kept_tokens": float(sum((found < weight_version).sum() for found in versions)),
        "staleness/span/mean": float(np.mean(spans)),
        "staleness/span/max": float(max(spans)),
    }


def _versions(trajectory: Trajectory) -> np.ndarray:
    """The weight versions of a trajectory's sampled tokens, int32 [sampled]."""
    return np.concatenate([segment.weight_versions[segment.loss_mask] for segment in trajectory.segments])
