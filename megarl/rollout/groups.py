"""Sampling of groups: several concurrent attempts at each of several problems."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Literal

from megarl.config.rollout import BudgetConfig
from megarl.data.dialogue import Dialogue
from megarl.environments import Environment
from megarl.environments.process_pool import EnvironmentPool
from megarl.rewards.calling import Sample
from megarl.rewards.worker import Scored
from megarl.rollout.answers import Answers
from megarl.rollout.attempt import Budget, Score, Task, attempt
from megarl.rollout.course import History
from megarl.rollout.pool import EnginePool, Generates, gather_unless_abandoned
from megarl.types import Problem, SamplingSettings, Trajectory

METRICS = {
    "environment/process_killed": (
        "count",
        "how often an environment's process was killed for its time, mean over attempts",
    ),
}
"""Names, units and meanings, for `tracking.table`."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A problem whose group is to be sampled, by whom and how."""

    sampler: GroupSampler
    problem: Problem
    sampling: SamplingSettings
    seed: str


async def sample_groups(
    draws: Sequence[Draw],
    samples_per_prompt: int,
    on_sampled: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> list[Trajectory]:
    """`samples_per_prompt` attempts at each problem, all at once, grouped by problem in the given order.

    The samplers share one pool. `on_sampled` runs once no attempt samples any more, beside the last rewards. Raises
    AbandonedError if the run is to stop; then all requests have left the engines.
    """
    if not draws:
        return []
    sampling = _Sampling(len(draws) * samples_per_prompt, on_sampled)
    attempts = [
        sampling.attempt(draw, draw.sampler.task(draw.problem, group, number, draw.seed, draw.sampling))
        for group, draw in enumerate(draws)
        for number in range(samples_per_prompt)
    ]
    sampler = draws[0].sampler
    beside = [] if on_sampled is None else [sampling.follow()]
    try:
        found = await gather_unless_abandoned(sampler.pool, [*attempts, *beside], sampler.is_abandoned)
        # An agent may have ended without its last answer.
        await sampler.pool.drained()
    finally:
        await sampling.followed()
    return [trajectory for trajectory in found if trajectory is not None]


class _Sampling:
    """Counts the attempts that may still sample; after the last of them, `then` runs."""

    def __init__(self, count: int, then: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        self._left, self._then = count, then
        self._is_over = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def attempt(self, draw: Draw, task: Task) -> Trajectory:
        """Make an attempt. It samples no more once it is scored, or has ended without."""
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._end_one()

        trajectory = await draw.sampler.attempt(task, draw.sampler.pool, end)
        end()
        return trajectory

    async def follow(self) -> None:
        """Wait until `then` has ended. Raises its error, at once; cancelling this does not cut `then` short."""
        await self._is_over.wait()
        assert self._following is not None
        await asyncio.shield(self._following)

    async def followed(self) -> None:
        """Wait for what `then` began, if it did. Raises its error."""
        if self._following is not None:
            await self._following

    def _end_one(self) -> None:
        self._left -= 1
        if not self._left and self._then is not None:
            self._following = asyncio.create_task(self._then())
            self._is_over.set()


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Samples and scores trajectories of problems; scoring overlaps with sampling.

    `environment` is the recipe's name of what `make_environment` makes, anew for each attempt, or of what runs in the
    processes of `environment_pool`; or `agent` makes the attempts. `tell_once` is called with the kind and the text of
    each failure, and tells the first of a kind.
    """

    pool: EnginePool
    dialogue: Dialogue
    score: Score
    environment: str
    make_environment: Callable[[], Environment] | None
    max_prompt_tokens: int
    max_turns: int = 1
    truncated_turn: Literal["end", "close"] = "end"
    history: History = "append"
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    is_abandoned: Callable[[], bool] = lambda: False
    tell_once: Callable[[str, str], object] = lambda kind, text: None
    agent: Callable[[Task, Budget, Generates], Awaitable[Trajectory]] | None = None
    environment_pool: EnvironmentPool | None = None
    answers: Answers = field(default_factory=Answers)

    async def sample(
        self, problems: Sequence[Problem], sampling: SamplingSettings, *, samples_per_prompt: int = 1, seed: str = ""
    ) -> list[Trajectory]:
        """`samples_per_prompt` attempts at each problem, grouped by problem in the given order.

        Raises AbandonedError if the run is to stop; then all requests have left the engines.
        """
        draws = [Draw(self, problem, sampling, seed) for problem in problems]
        return await sample_groups(draws, samples_per_prompt)

    def task(
        self, problem: Problem, group: int, number: int, seed: str, sampling: SamplingSettings, *, prefix: str = ""
    ) -> Task:
        """An attempt to make in the recipe's environment."""
        return Task(self.environment, problem, group, number, seed, sampling, prefix)

    async def attempt(
        self, task: Task, pool: Generates, before_score: Callable[[], object] = lambda: None
    ) -> Trajectory:
        """Make one attempt, with completions of `pool`.

        `before_score` is called where it is scored after it has sampled all, which agents do not tell.
        """

        async def score(sample: Sample) -> Scored:
            before_score()
            return await self.score(sample)

        room = self.max_prompt_tokens + task.sampling.max_new_tokens
        budget = Budget(room, self.max_turns, self.truncated_turn, **self.budget.model_dump())
        if self.agent is not None:
            trajectory = await self.agent(task, budget, pool)
        elif self.environment_pool is None:
            assert self.make_environment is not None
            trajectory = await self._played(task, budget, pool, self.make_environment, score)
        else:
            began = monotonic()
            async with self.environment_pool.seat() as seat:
                waited = monotonic() - began
                trajectory = await self._played(task, budget, pool, seat.environment, score, is_followed=True)
                killed = {"process_killed": float(seat.num_killed)}
            trajectory = replace(
                trajectory,
                metrics={**trajectory.metrics, **killed},
                environment_seconds=trajectory.environment_seconds + waited,
            )
        self._tell(trajectory)
        return self.answers.settle(trajectory)

    async def _played(
        self,
        task: Task,
        budget: Budget,
        pool: Generates,
        make_environment: Callable[[], Environment],
        score: Score,
        *,
        is_followed: bool = False,
    ) -> Trajectory:
        return await attempt(
            task, make_environment, pool, budget, self.dialogue, score, self.history, is_followed=is_followed
        )

    def _tell(self, trajectory: Trajectory) -> None:
        if trajectory.ended != "error" or trajectory.failure is None:
            return
        kind = trajectory.failure.partition(":")[0]
        self.tell_once(
            f"{trajectory.environment}: {kind}",
            f"an attempt of environment {trajectory.environment} at problem {trajectory.problem.index} ended with "
            f"an error (the first of its kind; all are counted in rollout/errors/{kind}): {trajectory.failure}",
        )
