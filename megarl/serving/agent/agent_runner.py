"""One run of a user's agent: its container, its session, the program or class, and a task's verifier."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from megarl.config.sections.rollout import AgentConfig
from megarl.data.sources.harbor import task_image
from megarl.environments import Agent
from megarl.rollout.attempt import Budget, Task
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.sandbox.containers.container import ContainerError
from megarl.serving.agent.containers import AttemptContainer, Containers
from megarl.serving.agent.harbor import HarborTask, VerifierError
from megarl.serving.agent.program_io import ProgramError, check_reward, make_task_input, read_output
from megarl.serving.session import Session
from megarl.serving.session_sampler import Limits
from megarl.serving.sessions import Sessions
from megarl.tracking.metric_rows import PER_ATTEMPT, MetricRow
from megarl.types import StorageError

if TYPE_CHECKING:
    from megarl.serving.endpoint import Endpoint

METRICS = (
    MetricRow("environment/program_seconds", "seconds", "run time of an agent's program", PER_ATTEMPT),
    MetricRow("environment/container_start_seconds", "seconds", "start of an attempt's container", PER_ATTEMPT),
    MetricRow("environment/model_seconds", "seconds", "an agent's program waited for completions", PER_ATTEMPT),
    MetricRow("environment/tool_seconds", "seconds", "an agent's program ran without waiting for one", PER_ATTEMPT),
    MetricRow("environment/verifier_seconds", "seconds", "run time of a task's verifier", PER_ATTEMPT),
    MetricRow("environment/live_containers", "count", "containers living when an attempt ended", PER_ATTEMPT),
    MetricRow(
        "environment/leaked_containers", "count", "containers of an attempt that could not be ended", PER_ATTEMPT
    ),
    MetricRow(
        "environment/outlived_driver", "fraction", "programs that went on after a driver was killed", PER_ATTEMPT
    ),
)

Result = TypeVar("Result")

INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE",
    "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
"""Environment variables of the driver that each agent program inherits.

All others are withheld: they may hold keys of trackers, judges and hubs. `rollout.agent.environment` names further
variables.
"""
_LEAVE_SECONDS = 2.0
"""Seconds to wait for a cancelled agent to end."""
_LOOK_SECONDS = 1.0
"""Seconds between two checks of a running program: has it too many refused calls, or exceeded a limit?"""
_MAX_REFUSED_CALLS = 100
"""Refused calls after which a program is killed: otherwise it may repeat them endlessly."""
_TAIL_CHARACTERS = 400
"""Characters of standard error quoted in the text of a failure."""
_TICK_SECONDS = 0.05
"""Shortest wait, in seconds, between two checks of a program's time limit.

A single long wait would end too early, because pauses of the engines extend the limit.
"""
LOST_PREFIXES = ("ContainerLost: ", "PeerLostError: ")
"""Prefixes of failure texts: the attempt lost its container, or the agent of the container's node."""
_LABEL = "agent"
"""Label of the agent's program in its container."""


class AgentRun(NamedTuple):
    """Results of one run of an agent. Its container (None: an `Agent` class) and its session have ended."""

    session: Session
    container: AttemptContainer | None
    reward: float | None
    """Printed by the program, returned by the class, or given by a verifier."""
    failure: str | None
    program_seconds: float
    verifier_seconds: float
    num_living: int
    """Containers of all attempts that lived when this run ended."""


@dataclass(frozen=True, slots=True)
class AgentRunner:
    """Runs the recipe's agent, a program or an `Agent` class, each time with a session of its own.

    At the end of a run the program is killed with all its descendants.
    """

    config: AgentConfig
    endpoint: Endpoint
    sessions: Sessions
    containers: Containers
    run_slots: asyncio.Semaphore
    """Limits the runs at one time (rollout.agent.max_processes)."""
    make_agent: Callable[[], Agent] | None = None
    """Constructor of the `Agent` class. None: the agent is a program."""

    async def run_agent(self, task: Task, harbor: HarborTask | None, budget: Budget, engine: AttemptEngine) -> AgentRun:
        """Run the agent in a container (a program) or in this process (a class), then a Harbor task's verifier."""
        verifier_seconds = 0.0
        async with AsyncExitStack() as stack:
            container: AttemptContainer | None = None
            start_failure: str | None = None
            try:
                if self.make_agent is None:
                    # Started before the attempt's turn, so that the attempt does not wait for it.
                    container = await stack.enter_async_context(self._adopt_or_start_container(task, harbor, engine))
            except ContainerError as error:
                start_failure = str(error)
            # The semaphore limits the programs running at once (rollout.agent.max_processes).
            await stack.enter_async_context(self.run_slots)
            limits = Limits(
                budget.context_tokens,
                budget.max_turns,
                idle_seconds=self.config.timeout_seconds,
                sampled_tokens=self.config.sampled_tokens,
            )
            session = await self._open_session(task, limits, engine, container)
            failure: str | None = None
            reward: float | None = None
            start_time = time.monotonic()
            try:
                if start_failure is not None:
                    raise ProgramError(start_failure)
                if container is None:
                    reward = await self._run_class(task, session, engine)
                else:
                    reward = await self._run_program(task, session, engine, container, harbor)
            except ProgramError as error:
                failure = str(error)
            finally:
                # Also after an error: ending the session aborts its calls in the engines.
                await self.sessions.end(session)
            program_seconds = time.monotonic() - start_time
            if failure is None and harbor is not None and container is not None:
                reward, failure = await _run_verifier(harbor, container)
                verifier_seconds = time.monotonic() - start_time - program_seconds
            num_living = self.containers.num_living
        # Made after the container has ended: only then `is_leaked` is known.
        return AgentRun(session, container, reward, failure, program_seconds, verifier_seconds, num_living)

    async def _run_class(self, task: Task, session: Session, engine: AttemptEngine) -> float | None:
        """Run an `Agent` class. Returns its reward, or None if it returns none. Raises ProgramError."""
        assert self.make_agent is not None
        try:
            agent_run = self.make_agent().run(make_task_input(task), self.endpoint.url_of(session), session.secret)
            reward = await _wait_within_limit(agent_run, engine, session, self.config.timeout_seconds)
        except TimeoutError:
            raise ProgramError(
                f"TimeoutError: the agent did not end within {self.config.timeout_seconds:g} s"
            ) from None
        except (ProgramError, StorageError):
            raise
        # A user's agent may raise anything. Its error ends the attempt, not the run.
        except Exception as error:
            raise ProgramError(f"{type(error).__name__}: {error}") from error
        return None if reward is None else check_reward(reward)

    @asynccontextmanager
    async def _adopt_or_start_container(
        self, task: Task, harbor: HarborTask | None, engine: AttemptEngine
    ) -> AsyncIterator[AttemptContainer]:
        """Use the last driver's container if it still runs, else start one. Raises ContainerError."""
        async with AsyncExitStack() as stack:
            container: AttemptContainer | None = None
            earlier_session = None if engine.log is None else engine.log.reopened
            if earlier_session is not None:
                try:
                    container = await stack.enter_async_context(
                        self.containers.adopt(earlier_session.node, earlier_session.container)
                    )
                except ContainerError:
                    self.sessions.stop_expecting(earlier_session.key)
                    engine.begin_again()
            yield container or await stack.enter_async_context(self._make_container_context(task, harbor))

    async def _open_session(
        self, task: Task, limits: Limits, engine: AttemptEngine, container: AttemptContainer | None
    ) -> Session:
        """Open an attempt's session. If its program outlived the last driver, restore the answers recorded so far."""
        log = engine.log
        num_aborted = 0 if log is None else log.num_aborted
        session = self.sessions.open(task.name, task.key, task.sampling, limits, engine, log, num_aborted=num_aborted)
        if log is not None and log.reopened is not None:
            await self.sessions.reopen(session, log.reopened)
        elif log is not None and container is not None and self.config.outlive_seconds is not None:
            log.open_session(session.name, session.secret, container.node.name, container.name)
        return session

    def _make_container_context(
        self, task: Task, harbor: HarborTask | None
    ) -> AbstractAsyncContextManager[AttemptContainer]:
        """Return the attempt's container. A Harbor task's image and limits replace the recipe's."""
        if harbor is None:
            return self.containers.start_container(task.name)
        image = task_image(harbor.fields, self.config.image, is_file=self.config.images_are_files)
        return self.containers.start_container(task.name, image, harbor.container_limits)

    async def _run_program(
        self,
        task: Task,
        session: Session,
        engine: AttemptEngine,
        container: AttemptContainer,
        harbor: HarborTask | None,
    ) -> float | None:
        """Run the agent program. Returns its reward, or None if it prints none. Raises ProgramError."""
        program, limit_seconds = self.config.command[0], self.config.timeout_seconds
        if harbor is not None:
            limit_seconds = harbor.limit_seconds(limit_seconds)
        seconds_left = limit_seconds - (container.seconds_running or 0.0)
        if container.seconds_running is not None:
            program_end = container.join(_LABEL)
        else:
            program_end = container.execute(
                self.config.command,
                self._make_variables(session, container),
                stdin=json.dumps(make_task_input(task)).encode() + b"\n",
                folder=None if harbor is None else harbor.workdir,
                label=_LABEL,
            )
        try:
            program_result = await _wait_within_limit(program_end, engine, session, seconds_left)
        except TimeoutError:
            text = f"TimeoutError: the program did not end within {limit_seconds:g} s"
            raise ProgramError(text) from None
        except ContainerError as error:
            raise ProgramError(str(error)) from error
        if program_result.refused:
            raise ProgramError(f"OSError: {program}: {program_result.refused}")
        if program_result.outcome:
            raise ProgramError(program_result.outcome)
        if program_result.exit_code != 0:
            tail = " ".join(program_result.stderr.split())[-_TAIL_CHARACTERS:]
            raise ProgramError(f"ExitCode: the program ended with {program_result.exit_code}: {tail}")
        reward, turn_rewards = read_output(program_result.stdout)
        if session.turn_rewards is None:
            session.turn_rewards = turn_rewards
        return reward

    def _make_variables(self, session: Session, container: AttemptContainer) -> dict[str, str]:
        """Return the environment variables of an agent program. With sandbox `process` they include `INHERITED`."""
        inherited_names = INHERITED if self.config.sandbox == "process" else ()
        url = container.url + self.endpoint.url_of(session).removeprefix(self.endpoint.base_url)
        return {
            **{name: os.environ[name] for name in (*inherited_names, *self.config.environment) if name in os.environ},
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": session.secret,
            # Anthropic's clients append `/v1` themselves.
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": session.secret,
        }


async def _wait_within_limit(
    work: Coroutine[Any, Any, Result], engine: AttemptEngine, session: Session, seconds: float
) -> Result:
    """Wait for `work` and return its result.

    Raises TimeoutError after `seconds` without the engines' pauses. Raises ProgramError if the endpoint refuses too
    many calls of the session, or a call beyond its limit of tokens. Raises StorageError if the journal cannot be
    written: the program would only repeat its failed calls.
    """
    # Pauses before the start must not extend the limit.
    deadline = time.monotonic() - engine.seconds_paused + seconds
    work_task = asyncio.create_task(work)
    try:
        while not work_task.done():
            seconds_left = deadline - time.monotonic() + engine.seconds_paused
            if seconds_left <= 0:
                raise TimeoutError
            _check_attempt(engine, session)
            if session.counts["refused_calls"] > _MAX_REFUSED_CALLS:
                raise ProgramError(
                    f"RefusedCalls: the program went on after {_MAX_REFUSED_CALLS} calls had been refused"
                )
            await asyncio.wait({work_task}, timeout=min(_LOOK_SECONDS, max(_TICK_SECONDS, seconds_left)))
    finally:
        work_task.cancel()
        # A user's agent may ignore its cancellation. The attempt must end anyway.
        await asyncio.wait({work_task}, timeout=_LEAVE_SECONDS)
    # A program may also end by itself after such an error or refusal.
    _check_attempt(engine, session)
    return work_task.result()


def _check_attempt(engine: AttemptEngine, session: Session) -> None:
    engine.check_storage()
    if session.outcome is not None:
        raise ProgramError(session.outcome)


async def _run_verifier(harbor: HarborTask, container: AttemptContainer) -> tuple[float | None, str | None]:
    """Return (reward, None), or (None, reason for the missing reward)."""
    try:
        return await harbor.verify(container), None
    except VerifierError as error:
        # A lost container is not the verifier's failure: the attempt begins again.
        cause = str(error.__cause__)
        return None, cause if cause.startswith(LOST_PREFIXES) else str(error)


def measure_times(run: AgentRun, engine: AttemptEngine) -> dict[str, float]:
    """Return the metrics of a run's durations, and of its container if it had one."""
    metrics = {"program_seconds": run.program_seconds, "model_seconds": engine.seconds}
    if run.container is not None:
        metrics |= {
            "container_start_seconds": run.container.seconds_to_start,
            "tool_seconds": max(0.0, run.program_seconds - engine.seconds_by_clock),
            "verifier_seconds": run.verifier_seconds,
            "live_containers": float(run.num_living),
            "leaked_containers": float(run.container.is_leaked),
            "outlived_driver": float(run.container.seconds_running is not None),
        }
    return metrics
