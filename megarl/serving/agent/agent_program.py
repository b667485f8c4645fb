"""Attempts made by a user's agent program. The program samples through the endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import cast

from megarl.cluster.agents.agent_link import AgentLink
from megarl.config import Recipe
from megarl.data.chat import tokenizer_of
from megarl.environments import Agent, environment_maker, is_agent
from megarl.rewards.scoring.results import verdict_by_value
from megarl.rollout.attempt import Budget, Score, Task
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.pool import EnginePool
from megarl.serving.agent.agent_runner import LOST_PREFIXES, AgentRunner, measure_times
from megarl.serving.agent.containers import Containers
from megarl.serving.agent.credit import read_turn_rewards
from megarl.serving.agent.harbor import HarborTask
from megarl.serving.agent.node_memory import RunMemory
from megarl.serving.agent.trajectories import make_sample, make_session_trajectory
from megarl.serving.codec import Codec
from megarl.serving.sessions import Sessions
from megarl.terminal import FirstOfEachKind
from megarl.types import Reward, SamplingSettings, Trajectory

_MAX_LOSSES = 2
"""Lost containers after which an attempt begins again. The next loss ends it with an error: its program may be the
cause.
"""


class _LostError(Exception):
    """Raised if an attempt's container is lost. Has the trajectory up to the loss."""

    def __init__(self, trajectory: Trajectory) -> None:
        super().__init__(trajectory.failure)
        self.trajectory = trajectory


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """Makes attempts with the recipe's agent, a program or an `Agent` class.

    A program reads the problem from standard input (`make_task_input`), and finds its session by environment
    variables. It prints its reward in the last line, or posts it to the endpoint. Otherwise the recipe's reward
    functions score the last completion.
    """

    runner: AgentRunner
    score: Score

    def expect(self, keys: Sequence[str], orphaned_containers: Sequence[tuple[str, str]] = ()) -> None:
        """Accept the requests of agents' programs.

        Programs of an earlier driver may still run. Their requests, with the session `keys`, wait until their sessions
        open. Containers in `orphaned_containers` (node, name) are ended: their programs cannot continue.
        """
        self.runner.sessions.expect(keys)
        self.runner.containers.end_earlier(orphaned_containers)
        self.runner.endpoint.accept()

    async def attempt(self, task: Task, budget: Budget, engine: AttemptEngine) -> Trajectory:
        """Run the agent for one attempt with completions from `engine`, and return the recorded trajectory.

        A program that outlived the last driver continues. If its container is lost, the attempt begins again.
        """
        self.runner.endpoint.accept()
        earlier_session = None if engine.log is None else engine.log.reopened
        if earlier_session is not None and (
            self.runner.config.outlive_seconds is None or self.runner.make_agent is not None
        ):
            # The recipe has changed since the last start: now programs end with the driver.
            self.runner.sessions.stop_expecting(earlier_session.key)
            self.runner.containers.end_earlier([(earlier_session.node, earlier_session.container)])
            engine.begin_again()
        start_time = time.monotonic()
        for num_starts in range(1, _MAX_LOSSES + 2):
            try:
                return await self._attempt_once(task, budget, engine, start_time)
            except _LostError as error:
                if num_starts > _MAX_LOSSES:
                    return error.trajectory
                engine.begin_again()
        raise AssertionError("the last loss returns")

    async def _attempt_once(self, task: Task, budget: Budget, engine: AttemptEngine, start_time: float) -> Trajectory:
        """Run the agent once, and score its attempt. Raises _LostError if its container is lost."""
        harbor = HarborTask.of(task.problem)
        run = await self.runner.run_agent(task, harbor, budget, engine)
        session, failure = run.session, run.failure
        turn_rewards: tuple[tuple[int, float], ...] = ()
        if failure is None and harbor is None and session.turn_rewards is not None:
            try:
                turn_rewards = read_turn_rewards(
                    session.turn_rewards, session.name, session.answers, self.runner.config.credit
                )
            except ValueError as error:
                failure = f"ValueError: {error}"
        trajectory = make_session_trajectory(
            task,
            session,
            failure,
            turn_rewards,
            self.runner.config,
            measure_times(run, engine),
            engine_seconds=engine.seconds,
            environment_seconds=time.monotonic() - start_time - engine.seconds_by_clock,
        )
        if failure is not None:
            if failure.startswith(LOST_PREFIXES):
                raise _LostError(trajectory)
            return trajectory
        # A verifier's reward has priority over a posted one, and a posted one over a printed one.
        reward = session.reward if harbor is None and session.reward is not None else run.reward
        if reward is not None or turn_rewards:
            total_reward = (reward or 0.0) + sum(value for _, value in turn_rewards)
            return replace(trajectory, reward=Reward(total_reward, True, verdict_by_value(total_reward)))
        scored_attempt = await self.score(make_sample(task.problem, session))
        return replace(trajectory, reward=scored_attempt.trajectory_reward, failure=scored_attempt.failure)


@asynccontextmanager
async def agent_program(
    recipe: Recipe,
    pool: EnginePool,
    score: Score,
    sampling: SamplingSettings,
    notify: Callable[[str], object],
    agents: Callable[[], Sequence[AgentLink]] = tuple,
    memory: RunMemory | None = None,
) -> AsyncIterator[AgentProgram | None]:
    """Start the endpoint for the recipe's agent, and stop it at the end. Yields None if the environment is not an
    agent.

    `sampling` has the sampling parameters of training. `notify` gets a text for the first change or refusal of each
    kind made to a client's request. `agents` returns the agents of the run's nodes, and `memory` is the memory of those
    nodes (see `Containers`).
    """
    name = recipe.rollout.environment
    if not is_agent(name):
        yield None
        return
    # Imported here: the import of aiohttp is slow, and few runs need it.
    from megarl.serving.endpoint import Endpoint

    # Attempts of training and of evaluations use the same endpoint.
    max_completion_tokens = max(sampling.max_new_tokens, recipe.evaluation_sampling.max_new_tokens)
    context_tokens = recipe.data.max_prompt_tokens + max_completion_tokens
    codec = Codec(tokenizer_of(recipe.model), context_tokens, recipe.rollout.tool_parser)
    sessions = Sessions(codec, FirstOfEachKind(notify))
    containers: Containers | None = None
    config = recipe.rollout.agent
    endpoint = Endpoint(
        sessions,
        recipe.rollout.endpoint,
        model=recipe.name,
        notice=notify,
        load=pool.load,
        is_held=config.outlive_seconds is not None,
    )
    try:
        await endpoint.start()
        containers = Containers(config, endpoint.address, agents=agents, notify=notify, memory=memory)
        await containers.start()
        make_agent = None
        if name != "command":
            make_agent = cast("Callable[[], Agent]", environment_maker(name, recipe.rollout.environment_kwargs))
        run_slots = asyncio.Semaphore(config.max_processes)
        yield AgentProgram(AgentRunner(config, endpoint, sessions, containers, run_slots, make_agent), score)
    finally:
        if containers is not None:
            await containers.close()
        # The endpoint first: its sessions still use the codec.
        await endpoint.close()
        codec.close()
