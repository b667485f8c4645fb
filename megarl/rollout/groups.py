"""Group sampling: several concurrent attempts at one problem."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Literal

from megarl.config.sections.rollout import BudgetConfig
from megarl.data.dialogue import Dialogue
from megarl.environments import Environment
from megarl.environments.environment_pool import EnvironmentPool
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.accuracy import Answers
from megarl.rollout.attempt import Budget, Score, Task, attempt
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.attempt_messages import History
from megarl.rollout.pool import EnginePool, gather_unless_abandoned
from megarl.tracking.metric_rows import PER_ATTEMPT, MetricRow
from megarl.types import Problem, SamplingSettings, Trajectory

METRICS = (
    MetricRow(
        "environment/process_killed",
        "count",
        "how often an environment's process was killed at its time limit",
        PER_ATTEMPT,
    ),
)


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Samples and scores trajectories for one environment's problems. Scoring overlaps with sampling.

    An attempt uses a new environment from `make_environment`, one in a process of `environment_pool`, or an external
    `agent` program. After a restart of the driver, call `expect_programs(keys, orphaned_containers)`. Agent programs
    with these API keys then continue, and the containers are ended. `notify_once(kind, text)` shows the user the first
    failure of each kind.
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
    notify_once: Callable[[str, str], object] = lambda kind, text: None
    agent: Callable[[Task, Budget, AttemptEngine], Awaitable[Trajectory]] | None = None
    expect_programs: Callable[[Sequence[str], Sequence[tuple[str, str]]], object] | None = None
    environment_pool: EnvironmentPool | None = None
    answers: Answers = field(default_factory=Answers)

    async def sample(
        self, problems: Sequence[Problem], sampling: SamplingSettings, *, samples_per_prompt: int = 1, seed: str = ""
    ) -> list[Trajectory]:
        """Return the trajectories of `samples_per_prompt` attempts at each problem, ordered by problem.

        Raises AbandonedError if the run must stop. By then the engines have no request left.
        """
        attempts = [
            self.attempt(self.task(problem, group, attempt_number, seed, sampling), AttemptEngine(self.pool))
            for group, problem in enumerate(problems)
            for attempt_number in range(samples_per_prompt)
        ]
        trajectories = await gather_unless_abandoned(self.pool, attempts, self.is_abandoned)
        # An agent may end before a request of its own has left the engine.
        await self.pool.wait_until_drained()
        return trajectories

    def task(
        self, problem: Problem, group: int, number: int, seed: str, sampling: SamplingSettings, *, prefix: str = ""
    ) -> Task:
        return Task(self.environment, problem, group, number, seed, sampling, prefix)

    async def attempt(
        self, task: Task, engine: AttemptEngine, before_score: Callable[[], object] = lambda: None
    ) -> Trajectory:
        """Run one attempt with completions from `engine`.

        `before_score` is called after the last completion. It is never called for agent programs, because they do not
        report their last completion.
        """

        async def score(sample: Sample) -> Scored:
            before_score()
            return await self.score(sample)

        context_tokens = self.max_prompt_tokens + task.sampling.max_new_tokens
        budget = Budget(context_tokens, self.max_turns, self.truncated_turn, **self.budget.model_dump())
        if self.agent is not None:
            trajectory = await self.agent(task, budget, engine)
        elif self.environment_pool is None:
            assert self.make_environment is not None
            trajectory = await self._attempt_in_environment(task, budget, engine, self.make_environment, score)
        else:
            wait_began = monotonic()
            async with self.environment_pool.reserve_process() as process:
                # Waiting for a free process is part of the environment's time.
                process_wait_seconds = monotonic() - wait_began
                # Another attempt waits for this process, so the engines must expect its requests.
                engine.is_followed = True
                trajectory = await self._attempt_in_environment(task, budget, engine, process.environment, score)
                process_metrics = {"process_killed": float(process.num_killed)}
            trajectory = replace(
                trajectory,
                metrics={**trajectory.metrics, **process_metrics},
                environment_seconds=trajectory.environment_seconds + process_wait_seconds,
            )
        self._notify_error(trajectory)
        return self.answers.drop_biased_verdict(trajectory)

    async def _attempt_in_environment(
        self,
        task: Task,
        budget: Budget,
        engine: AttemptEngine,
        make_environment: Callable[[], Environment],
        score: Score,
    ) -> Trajectory:
        trajectory = await attempt(task, make_environment, engine, budget, self.dialogue, score, self.history)
        if names := self.dialogue.unwritten_names([message for new in trajectory.messages for message in new]):
            self.notify_once(
                f"{trajectory.environment}: name of a message",
                f"environment {trajectory.environment} gave a message the name {names[0]!r:.40}; the chat template "
                "writes no names, so the policy does not see it: write it into the content",
            )
        return trajectory

    def _notify_error(self, trajectory: Trajectory) -> None:
        """Notify the user of the first error of each kind."""
        if trajectory.ended != "error" or trajectory.failure is None:
            return
        error_kind = trajectory.failure.partition(":")[0]
        self.notify_once(
            f"{trajectory.environment}: {error_kind}",
            f"an attempt of environment {trajectory.environment} at problem {trajectory.problem.index} ended with "
            f"an error (the first of its kind; all are counted in rollout/errors/{error_kind}): {trajectory.failure}",
        )
