"""Partial rollouts: a step trains on the first complete groups; stragglers continue into later steps."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from megarl.config import Recipe
from megarl.data.token_batch import TokenBatch
from megarl.rollout.buffer import Buffer
from megarl.rollout.dynamic_sampling import passes_filter, starved_text
from megarl.rollout.pool import BUDGET_SECONDS, AbandonedError
from megarl.rollout.recording import RecordedPool, StartedGroup
from megarl.rollout.source import Source
from megarl.rollout.state import Group, RLState, in_one
from megarl.types import MegarlError, Trajectory

METRICS = {
    "partial/share": ("share", "trajectories with tokens of several weight versions"),
    "partial/kept_tokens": ("tokens", "tokens of earlier weight versions"),
    "staleness/span/mean": ("versions", "weight versions from a trajectory's oldest token to its newest, mean"),
    "staleness/span/max": ("versions", "weight versions from a trajectory's oldest token to its newest, the most"),
    "staleness/dropped": ("count", "groups dropped for exceeding the staleness bound"),
    "staleness/waited_seconds": ("seconds", "how long the step waited only for groups at the staleness bound"),
    "rollout/aborted": ("count", "groups dropped as surplus"),
    "rollout/in_flight": ("count", "groups continuing into the next step"),
    "rollout/ready": ("count", "complete groups waiting for a later step"),
    "rollout/drawn": ("count", "groups started since the run began"),
    "rollout/used": ("count", "groups trained on since the run began"),
    "rollout/given_up": (
        "count",
        "groups dropped, aborted or filtered out since the run began; every other group drawn is used, in flight or "
        "ready",
    ),
}
"""Names, units and meanings, for `tracking.table`."""

_LEAVE_SECONDS = 5.0
"""Seconds to wait at the end for cancelled attempts."""


class PartialBuffer(Buffer):
    """A buffer that starts `algorithm.oversampling` times a step's groups and returns the first complete ones.

    The other groups continue. While the engines sleep, their requests are paused and their environments run on. With
    `rollout.stragglers` abort they are aborted instead. Each group is returned once, and within `rollout.max_staleness`
    weight versions. For a group at this bound the step waits, or it drops the group (`rollout.on_stale`).

    `state.started` holds the groups in flight by the number of their prompt. Checkpoints save them.
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
        """Complete groups not yet delivered to a step, collected since the previous delivery."""
        self._num_started = 0
        """Number of groups started since groups were last delivered to a step."""

    async def take(self, num_groups: int, weight_version: int, engine_version: int | None = None) -> list[Group]:
        """Return the groups to train a step on, ordered by when their prompts were drawn.

        Raises MegarlError if `algorithm.max_attempts` times a step's groups do not fill it. Raises AbandonedError if
        the run must stop, and the error of a failed attempt.
        """
        state = self._state
        self._step, self._num_groups = weight_version, num_groups
        self._engine_version = weight_version if engine_version is None else engine_version
        self._counts = {"staleness/dropped": 0.0, "staleness/waited_seconds": 0.0, "rollout/aborted": 0.0}
        # The previous step is trained: `forget_step` must no longer return its groups.
        state.give([])
        self._drop_stale()
        while True:
            self._collect()
            self._start_more(self._num_live)
            # Filtered-out groups make room, so new ones start before each check.
            if (taken := self._chosen()) is not None:
                break
            self._refuse_starved()
            # With enough groups ready, only groups at the staleness bound can delay the step.
            is_waited_for = len(state.waiting) >= num_groups
            began = time.monotonic()
            await self._wait_for_a_group()
            self._counts["staleness/waited_seconds"] += is_waited_for * (time.monotonic() - began)
            if any(source.sampler.is_abandoned() for source in self._sources.values()):
                raise AbandonedError
        # `forget_step` returns these groups to the waiting ones, so that nothing is sampled twice.
        state.give(taken)
        if self._recipe.rollout.stragglers == "abort":
            self._abort_all()
        self._measure(taken)
        return [[replace(t, group=number) for t in group] for number, group in enumerate(taken)]

    async def add_old_logprobs(
        self, groups: Sequence[Group], forward: Callable[[TokenBatch], Awaitable[np.ndarray]]
    ) -> list[Group]:
        """Differs from `Buffer.add_old_logprobs`: only these groups get log-probs, waiting ones do not.

        No single weight version sampled all tokens of a waiting group. So its old policy is the trainer's just before
        the update training on it.
        """
        # Groups may complete and join `state.waiting` during the forward pass, so leave that list untouched.
        taken, _ = await self._with_old_logprobs(groups, [], forward)
        return taken

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last step."""
        counts = self._counts | self._position_metrics()
        if self._recipe.algorithm.dynamic_sampling is not None:
            counts["rollout/kept"] = self._num_passed / max(self._num_batches, 1)
        return counts

    async def aclose(self) -> None:
        """Cancel all groups in flight. Environments that ignore the cancellation are left running after 5 seconds."""
        self._leave(list(self._tasks))
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=_LEAVE_SECONDS)

    @property
    def _num_live(self) -> int:
        """Maximum number of groups, in flight or complete, while a step waits for its own."""
        return ceil(self._num_groups * self._recipe.algorithm.oversampling)

    def _start_more(self, num_live: int) -> None:
        """Resume the groups of a checkpoint, then start new ones until `num_live` exist."""
        state = self._state
        for group in state.started.values():
            if group.draw not in self._tasks:
                self._start(group)
        while len(state.started) + len(state.waiting) < num_live and not self._has_drawn_enough:
            problem = self._next_problem()
            # All attempts of a group share one temperature, even if its schedule moves on during a long group.
            temperature = self._sources[problem.source].sampling(self._step).temperature
            group = StartedGroup(state.drawn, problem, temperature)
            state.started[group.draw] = group
            state.drawn += 1
            self._num_started += 1
            self._start(group)

    @property
    def _has_drawn_enough(self) -> bool:
        """Whether a step has drawn the maximum number of prompts allowed to fill it."""
        algorithm = self._recipe.algorithm
        return bool(algorithm.dynamic_sampling) and self._num_started >= algorithm.max_attempts * self._num_live

    def _refuse_starved(self) -> None:
        """Raise MegarlError if no remaining group can fill the step."""
        state = self._state
        if self._has_drawn_enough and len(state.started) + len(state.waiting) < self._num_live:
            found = f"{self._num_started} prompts gave {len(state.waiting)} groups"
            raise MegarlError(starved_text(self._recipe.algorithm, found, self._collected))

    def _start(self, group: StartedGroup) -> None:
        self._pools[group.draw] = []
        task = self._tasks[group.draw] = asyncio.create_task(self._sample(group))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Wake `take` after an attempt at a group ended in any way."""
        self._completed.set()

    async def _sample(self, group: StartedGroup) -> None:
        """Run the unfinished attempts at a group's problem concurrently."""
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
        """Wait until a group completes or fails, at most 1 second: the run may have to stop."""
        self._completed.clear()
        if any(task.done() for task in self._tasks.values()):
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._completed.wait(), BUDGET_SECONDS)

    def _collect(self) -> None:
        """Move complete groups to the waiting ones, if they pass the filter. Raises the error of an attempt."""
        state, recipe = self._state, self._recipe
        for draw in [draw for draw, task in self._tasks.items() if task.done()]:
            try:
                self._tasks[draw].result()
            except ExceptionGroup as errors:
                # TaskGroup wraps errors. The first is the cause; the others are cancellations or repeats.
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
        """Return the step's groups, those at the staleness bound first; None while too few are ready."""
        rollout, state = self._recipe.rollout, self._state
        newest = self._step - rollout.staleness_bound
        waits = rollout.stragglers == "park" and rollout.on_stale == "wait"
        is_awaited = any(group.oldest_version(self._engine_version) <= newest for group in state.started.values())
        if len(state.waiting) < self._num_groups or (waits and is_awaited):
            return None
        # False sorts before True: groups at the bound come first. The sort is stable, so ties keep their order.
        by_age = sorted(state.waiting, key=lambda group: _oldest(group, self._step) > newest)
        return sorted(by_age[: self._num_groups], key=draw_of)

    def _drop_stale(self) -> None:
        """Drop groups with tokens older than the staleness bound."""
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
        """Drop the surplus: groups in flight, and complete groups unused by the step."""
        state = self._state
        surplus = len(state.started) + len(state.waiting)
        self._counts["rollout/aborted"] += surplus
        state.given_up += surplus
        self._leave(list(self._tasks))
        state.started.clear()
        state.waiting = []

    def _measure(self, taken: Sequence[Group]) -> None:
        """Record what was sampled since the previous step, and where all groups are."""
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
        """Cancel these groups and withdraw their requests from the engines."""
        for draw in draws:
            if (task := self._tasks.pop(draw, None)) is not None:
                for pool in self._pools.pop(draw):
                    # Close the pools before cancelling: an environment may swallow its cancellation and request more
                    # samples.
                    pool.close()
                task.cancel()
                self._leaving.add(task)
                task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it: asyncio would log an error that nobody awaits


def draw_of(group: Group) -> int:
    """Return a group's draw number: the position of its prompt in the order in which prompts were drawn."""
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
    """Return the weight versions of a trajectory's sampled tokens, int32 [sampled]."""
    return np.concatenate([segment.weight_versions[segment.loss_mask] for segment in trajectory.segments])
