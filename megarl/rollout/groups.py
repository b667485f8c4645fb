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
from megarl.environments.environment_pool import EnvironmentPool
from megarl.rewards.calling import Sample
from megarl.rewards.reward_process import Scored
from megarl.rollout.accuracy import Answers
from megarl.rollout.attempt import Budget, Score, Task, attempt
from megarl.rollout.attempt_messages import History
from megarl.rollout.pool import EnginePool, Generates, gather_unless_abandoned
from megarl.types import Problem, SamplingSettings, Trajectory

METRICS = {
    "environment/process_killed": (
        "count",
        "how often an environment's process was killed at its time limit, mean over attempts",
    ),
}
"""Names, units and meanings, for `tracking.table`."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A problem to sample a group for, with its sampler and sampling parameters."""

    sampler: GroupSampler
    problem: Problem
    sampling: SamplingSettings
    seed: str


async def sample_groups(
    draws: Sequence[Draw],
    samples_per_prompt: int,
    on_sampled: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> list[Trajectory]:
    """Run `samples_per_prompt` attempts at each problem, all at once. Returns trajectories by problem, in order.

    The samplers share one pool. `on_sampled` runs after the last completion, while the last rewards are computed.
    Raises AbandonedError if the run must stop; by then all requests have left the engines.
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
        # An agent may end while a request of its own still runs in an engine.
        await sampler.pool.drained()
    finally:
        # Even after an error: whoever handles it must find the engines in a definite state.
        await sampling.followed()
    return [trajectory for trajectory in found if trajectory is not None]


class _Sampling:
    """Counts attempts still sampling, and starts `then` after the last of them."""

    def __init__(self, count: int, then: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        self._left, self._then = count, then
        self._is_over = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def attempt(self, draw: Draw, task: Task) -> Trajectory:
        """Run an attempt. It stops sampling when its scoring begins, or when it ends unscored."""
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._end_one()

        # Agents and failed attempts never score, so their end counts instead.
        trajectory = await draw.sampler.attempt(task, draw.sampler.pool, end)
        end()
        return trajectory

    async def follow(self) -> None:
        """Wait until `then` has ended, raising its error at once. Cancelling this call does not interrupt `then`."""
        await self._is_over.wait()
        assert self._following is not None
        await asyncio.shield(self._following)

    async def followed(self) -> None:
        """Wait for `then` if it has started. Raises its error."""
        if self._following is not None:
            await self._following

    def _end_one(self) -> None:
        self._left -= 1
        # A task of its own, so cancelled attempts do not cancel it: `then` puts engines to sleep, a call to all ranks.
        if not self._left and self._then is not None:
            self._following = asyncio.create_task(self._then())
            self._is_over.set()


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Samples and scores trajectories of one environment's problems. Scoring overlaps with sampling.

    `environment` is the environment's name in the recipe. The attempts use a new object from `make_environment` each,
    or a process of `environment_pool`, or `agent` makes them. `tell_once(kind, text)` reports a failure to the user; it
    shows only the first of each kind.
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
        """Run `samples_per_prompt` attempts at each problem. Returns trajectories by problem, in order.

        Raises AbandonedError if the run must stop; by then all requests have left the engines.
        """
        draws = [Draw(self, problem, sampling, seed) for problem in problems]
        return await sample_groups(draws, samples_per_prompt)

    def task(
        self, problem: Problem, group: int, number: int, seed: str, sampling: SamplingSettings, *, prefix: str = ""
    ) -> Task:
        """Return the description of an attempt in this sampler's environment."""
        return Task(self.environment, problem, group, number, seed, sampling, prefix)

    async def attempt(
        self, task: Task, pool: Generates, before_score: Callable[[], object] = lambda: None
    ) -> Trajectory:
        """Run one attempt with completions from `pool`.

        `before_score` is called when scoring begins, after the last completion. Agents never call it: they do not
        report the end of their sampling.
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
                # Waiting for a free process is part of the environment's time.
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
        """Run an attempt in an environment."""
        return await attempt(
            task, make_environment, pool, budget, self.dialogue, score, self.history, is_followed=is_followed
        )

    def _tell(self, trajectory: Trajectory) -> None:
        """Report the failure of an attempt, if it has one."""
        if trajectory.ended != "error" or trajectory.failure is None:
            return
        kind = trajectory.failure.partition(":")[0]
        self.tell_once(
            f"{trajectory.environment}: {kind}",
            f"an attempt of environment {trajectory.environment} at problem {trajectory.problem.index} ended with "
            f"an error (the first of its kind; all are counted in rollout/errors/{kind}): {trajectory.failure}",
        )
