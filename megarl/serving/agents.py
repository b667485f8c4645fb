"""Attempts made by a user's agent program. The program samples through the endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from megarl.cluster.agents.agent_link import AgentLink
from megarl.config import Recipe
from megarl.config.sections.rollout import AgentConfig
from megarl.data.chat import tokenizer_of
from megarl.data.sources.harbor import FIELD, task_image
from megarl.environments import Agent, Message, environment_maker, is_agent
from megarl.files.strict_json import RepeatedKeyError, finite_number, make_object
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.results import verdict_by_value
from megarl.rollout.attempt import Budget, Score, Task, empty_call, make_trajectory
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.pool import EnginePool
from megarl.sandbox.containers.container import ContainerError
from megarl.serving.answers import Answer
from megarl.serving.codec import Codec
from megarl.serving.containers import AttemptContainer, Containers
from megarl.serving.credit import read_turn_rewards, trained_answers
from megarl.serving.harbor import HarborTask, VerifierError
from megarl.serving.node_memory import RunMemory
from megarl.serving.session import Session
from megarl.serving.session_sampler import Limits
from megarl.serving.sessions import Sessions
from megarl.terminal import FirstOfEachKind
from megarl.tracking.metric_rows import PER_ATTEMPT, MetricRow
from megarl.types import Ended, Problem, Reward, SamplingSettings, StorageError, Trajectory

if TYPE_CHECKING:
    from megarl.serving.endpoint import Endpoint

METRICS = (
    MetricRow("environment/forks", "count", "calls of an agent not continuing from the session's tokens", PER_ATTEMPT),
    MetricRow(
        "environment/abandoned_calls", "count", "calls of an agent aborted because its client went away", PER_ATTEMPT
    ),
    MetricRow(
        "environment/joined_retries", "count", "calls sent again by an agent before it had their answers", PER_ATTEMPT
    ),
    MetricRow(
        "environment/overridden_fields",
        "count",
        "sampling fields in an agent's requests replaced by the recipe's values",
        PER_ATTEMPT,
    ),
    MetricRow("environment/refused_calls", "count", "refused calls of an agent", PER_ATTEMPT),
    MetricRow(
        "environment/untrained_tokens",
        "tokens",
        "sampled tokens of an agent not trained on, aborted calls included",
        PER_ATTEMPT,
    ),
    MetricRow(
        "environment/unreported_calls",
        "count",
        "calls of an agent with unknown tokens, because their engine was lost or did not report an aborted call; "
        "untrained_tokens excludes these tokens",
        PER_ATTEMPT,
    ),
    MetricRow("environment/model_calls", "count", "completions of an agent", PER_ATTEMPT),
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

COUNTS = (
    "forks", "abandoned_calls", "joined_retries", "overridden_fields", "refused_calls", "untrained_tokens",
    "unreported_calls",
)  # fmt: skip
"""Names in `Session.counts` logged as metrics `environment/NAME`."""
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
_MAX_LOSSES = 2
"""Lost containers after which an attempt begins again. The next loss ends it with an error: its program may be the
cause.
"""
_LOSSES = ("ContainerLost: ", "PeerLostError: ")
"""Prefixes of failure texts: the attempt lost its container, or the agent of the container's node."""
_LABEL = "agent"
"""Label of the agent's program in its container."""


class _LostError(Exception):
    """Raised if an attempt's container is lost. Has the trajectory up to the loss."""

    def __init__(self, trajectory: Trajectory) -> None:
        super().__init__(trajectory.failure)
        self.trajectory = trajectory


class _AgentRun(NamedTuple):
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


class _ProgramError(Exception):
    """Raised to end an agent's attempt with an error. Its text has the form `KIND: reason`."""


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """Runs the recipe's agent, a program or an `Agent` class, once per attempt. Each attempt has its own session.

    A program reads the problem from standard input (`_make_task_input`), and finds its session by environment
    variables. It prints its reward in the last line, or posts it to the endpoint. Otherwise the recipe's reward
    functions score the last completion. At the end the program is killed with all its descendants.
    """

    config: AgentConfig
    endpoint: Endpoint
    sessions: Sessions
    score: Score
    containers: Containers
    places: asyncio.Semaphore
    make_agent: Callable[[], Agent] | None = None

    def expect(self, keys: Sequence[str], orphaned_containers: Sequence[tuple[str, str]] = ()) -> None:
        """Accept requests.

        After a restart of the driver, programs of the last driver may still run. Their requests, with the session
        `keys`, wait until their sessions open. The programs of `orphaned_containers` (node, name) cannot continue, so
        these containers are ended.
        """
        self.sessions.expect(keys)
        self.containers.end_earlier(orphaned_containers)
        self.endpoint.accept()

    async def attempt(self, task: Task, budget: Budget, engine: AttemptEngine) -> Trajectory:
        """Run the agent for one attempt with completions from `engine`, and return the recorded trajectory.

        A program that outlived the last driver continues. If its container is lost, the attempt begins again.
        """
        self.endpoint.accept()
        earlier = None if engine.log is None else engine.log.reopened
        if earlier is not None and (self.config.outlive_seconds is None or self.make_agent is not None):
            # The recipe has changed since the last start: now programs end with the driver.
            self.sessions.cease_to_expect(earlier.key)
            self.containers.end_earlier([(earlier.node, earlier.container)])
            engine.begin_again()
        began = time.monotonic()
        for num_starts in range(1, _MAX_LOSSES + 2):
            try:
                return await self._attempt_once(task, budget, engine, began)
            except _LostError as error:
                if num_starts > _MAX_LOSSES:
                    return error.trajectory
                engine.begin_again()
        raise AssertionError("the last loss returns")

    async def _attempt_once(self, task: Task, budget: Budget, engine: AttemptEngine, began: float) -> Trajectory:
        """Run the agent once, and score its attempt. Raises _LostError if its container is lost."""
        harbor = HarborTask.of(task.problem)
        run = await self._run_agent(task, harbor, budget, engine)
        session, failure = run.session, run.failure
        turn_rewards: tuple[tuple[int, float], ...] = ()
        if failure is None and harbor is None and session.turn_rewards is not None:
            try:
                turn_rewards = read_turn_rewards(
                    session.turn_rewards, session.name, session.answers, self.config.credit
                )
            except ValueError as error:
                failure = f"ValueError: {error}"
        trajectory = _make_trajectory(
            task,
            session,
            failure,
            turn_rewards,
            self.config,
            _measure_times(run, engine),
            engine_seconds=engine.seconds,
            environment_seconds=time.monotonic() - began - engine.seconds_by_clock,
        )
        if failure is not None:
            if failure.startswith(_LOSSES):
                raise _LostError(trajectory)
            return trajectory
        # A verifier's reward has priority over a posted one, and a posted one over a printed one.
        reward = session.reward if harbor is None and session.reward is not None else run.reward
        if reward is not None or turn_rewards:
            total = (reward or 0.0) + sum(value for _, value in turn_rewards)
            return replace(trajectory, reward=Reward(total, True, verdict_by_value(total)))
        scored = await self.score(_make_sample(task.problem, session))
        return replace(trajectory, reward=scored.trajectory_reward, failure=scored.failure)

    async def _run_agent(
        self, task: Task, harbor: HarborTask | None, budget: Budget, engine: AttemptEngine
    ) -> _AgentRun:
        """Run the agent in a container (a program) or in this process (a class), then a Harbor task's verifier."""
        verifier_seconds = 0.0
        async with AsyncExitStack() as stack:
            container: AttemptContainer | None = None
            start_failure: str | None = None
            try:
                if self.make_agent is None:
                    # Started before the attempt's turn, so that the attempt does not wait for it.
                    container = await stack.enter_async_context(self._adopt_or_start(task, harbor, engine))
            except ContainerError as error:
                start_failure = str(error)
            # The semaphore limits the programs running at once (rollout.agent.max_processes).
            await stack.enter_async_context(self.places)
            limits = Limits(
                budget.context_tokens,
                budget.max_turns,
                idle_seconds=self.config.timeout_seconds,
                sampled_tokens=self.config.sampled_tokens,
            )
            session = await self._open_session(task, limits, engine, container)
            failure: str | None = None
            reward: float | None = None
            started = time.monotonic()
            try:
                if start_failure is not None:
                    raise _ProgramError(start_failure)
                if container is None:
                    reward = await self._run_class(task, session, engine)
                else:
                    reward = await self._run_program(task, session, engine, container, harbor)
            except _ProgramError as error:
                failure = str(error)
            finally:
                # Also after an error: ending the session aborts its calls in the engines.
                await self.sessions.end(session)
            program_seconds = time.monotonic() - started
            if failure is None and harbor is not None and container is not None:
                reward, failure = await _verify(harbor, container)
                verifier_seconds = time.monotonic() - started - program_seconds
            num_living = self.containers.num_living
        # Made after the container has ended: only then `is_leaked` is known.
        return _AgentRun(session, container, reward, failure, program_seconds, verifier_seconds, num_living)

    async def _run_class(self, task: Task, session: Session, engine: AttemptEngine) -> float | None:
        """Run an `Agent` class. Returns its reward, or None if it returns none. Raises _ProgramError."""
        assert self.make_agent is not None
        try:
            run = self.make_agent().run(_make_task_input(task), self.endpoint.url_of(session), session.secret)
            reward = await self._wait_within_limit(run, engine, session, self.config.timeout_seconds)
        except TimeoutError:
            raise _ProgramError(
                f"TimeoutError: the agent did not end within {self.config.timeout_seconds:g} s"
            ) from None
        except (_ProgramError, StorageError):
            raise
        # A user's agent may raise anything. Its error ends the attempt, not the run.
        except Exception as error:
            raise _ProgramError(f"{type(error).__name__}: {error}") from error
        return None if reward is None else _check_reward(reward)

    @asynccontextmanager
    async def _adopt_or_start(
        self, task: Task, harbor: HarborTask | None, engine: AttemptEngine
    ) -> AsyncIterator[AttemptContainer]:
        """Use the last driver's container if it still runs, else start one. Raises ContainerError."""
        async with AsyncExitStack() as stack:
            container: AttemptContainer | None = None
            earlier = None if engine.log is None else engine.log.reopened
            if earlier is not None:
                try:
                    container = await stack.enter_async_context(self.containers.adopt(earlier.node, earlier.container))
                except ContainerError:
                    self.sessions.cease_to_expect(earlier.key)
                    engine.begin_again()
            yield container or await stack.enter_async_context(self._container_context(task, harbor))

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

    def _container_context(
        self, task: Task, harbor: HarborTask | None
    ) -> AbstractAsyncContextManager[AttemptContainer]:
        """Return the attempt's container. A Harbor task's image and limits replace the recipe's."""
        if harbor is None:
            return self.containers.container(task.name)
        image = task_image(harbor.fields, self.config.image, is_file=self.config.images_are_files)
        return self.containers.container(task.name, image, harbor.container_limits)

    async def _run_program(
        self,
        task: Task,
        session: Session,
        engine: AttemptEngine,
        container: AttemptContainer,
        harbor: HarborTask | None,
    ) -> float | None:
        """Run the agent program. Returns its reward, or None if it prints none. Raises _ProgramError."""
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
                stdin=json.dumps(_make_task_input(task)).encode() + b"\n",
                folder=None if harbor is None else harbor.workdir,
                label=_LABEL,
            )
        try:
            executed = await self._wait_within_limit(program_end, engine, session, seconds_left)
        except TimeoutError:
            text = f"TimeoutError: the program did not end within {limit_seconds:g} s"
            raise _ProgramError(text) from None
        except ContainerError as error:
            raise _ProgramError(str(error)) from error
        if executed.refused:
            raise _ProgramError(f"OSError: {program}: {executed.refused}")
        if executed.outcome:
            raise _ProgramError(executed.outcome)
        if executed.exit_code != 0:
            tail = " ".join(executed.stderr.split())[-_TAIL_CHARACTERS:]
            raise _ProgramError(f"ExitCode: the program ended with {executed.exit_code}: {tail}")
        reward, turn_rewards = _read_output(executed.stdout)
        if session.turn_rewards is None:
            session.turn_rewards = turn_rewards
        return reward

    def _make_variables(self, session: Session, container: AttemptContainer) -> dict[str, str]:
        """Return the environment variables of an agent program. With sandbox `process` they include `INHERITED`."""
        inherited = INHERITED if self.config.sandbox == "process" else ()
        url = container.url + self.endpoint.url_of(session).removeprefix(self.endpoint.base_url)
        return {
            **{name: os.environ[name] for name in (*inherited, *self.config.environment) if name in os.environ},
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": session.secret,
            # Anthropic's clients append `/v1` themselves.
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": session.secret,
        }

    async def _wait_within_limit(
        self, work: Coroutine[Any, Any, Result], engine: AttemptEngine, session: Session, seconds: float
    ) -> Result:
        """Wait for `work` and return its result.

        Raises TimeoutError after `seconds`, not counting time in which the engines are paused. Raises _ProgramError if
        the endpoint refuses too many calls of the session, or a call beyond its limit of tokens. Raises StorageError if
        the journal cannot be written, because the program would only repeat its failed calls.
        """
        # Pauses before the start must not extend the limit.
        deadline = time.monotonic() - engine.seconds_paused + seconds
        work_task = asyncio.create_task(work)
        try:
            while not work_task.done():
                seconds_left = deadline - time.monotonic() + engine.seconds_paused
                if seconds_left <= 0:
                    raise TimeoutError
                engine.check_storage()
                if session.outcome is not None:
                    raise _ProgramError(session.outcome)
                if session.counts["refused_calls"] > _MAX_REFUSED_CALLS:
                    raise _ProgramError(
                        f"RefusedCalls: the program went on after {_MAX_REFUSED_CALLS} calls had been refused"
                    )
                await asyncio.wait({work_task}, timeout=min(_LOOK_SECONDS, max(_TICK_SECONDS, seconds_left)))
        finally:
            work_task.cancel()
            # A user's agent may ignore its cancellation. The attempt must end anyway.
            await asyncio.wait({work_task}, timeout=_LEAVE_SECONDS)
        # A program may also end by itself after such an error or refusal.
        engine.check_storage()
        if session.outcome is not None:
            raise _ProgramError(session.outcome)
        return work_task.result()


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
        places = asyncio.Semaphore(config.max_processes)
        yield AgentProgram(config, endpoint, sessions, score, containers, places, make_agent)
    finally:
        if containers is not None:
            await containers.close()
        # The endpoint first: its sessions still use the codec.
        await endpoint.close()
        codec.close()


async def _verify(harbor: HarborTask, container: AttemptContainer) -> tuple[float | None, str | None]:
    """Run a task's verifier. Returns (reward, None), or (None, reason for the missing reward)."""
    try:
        return await harbor.verify(container), None
    except VerifierError as error:
        # A lost container is not the verifier's failure: the attempt begins again.
        cause = str(error.__cause__)
        return None, cause if cause.startswith(_LOSSES) else str(error)


def _measure_times(run: _AgentRun, engine: AttemptEngine) -> dict[str, float]:
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


def _make_task_input(task: Task) -> dict[str, Any]:
    """Return the JSON object that an agent program reads from standard input."""
    problem = task.problem
    values = {
        "messages": [dict(message) for message in problem.messages],
        "answer": problem.answer,
        # The task's folder is on the driver's machine. The program cannot read it.
        "record": {name: value for name, value in problem.record.items() if name != FIELD},
        "index": problem.index,
        "number": task.number,
        "seed": task.key,
    }
    # A copy: an agent may change its input, and other attempts share these objects.
    return deepcopy(values)


def _check_reward(reward: object) -> float:
    number = finite_number(reward)
    if number is None:
        raise _ProgramError(f"ValueError: the program's reward is {reward!r:.80}, not a finite number")
    return number


def _read_output(output: str) -> tuple[float | None, Any]:
    """Return a program's reward and its rewards of single turns (as printed, unchecked) from the last line of its
    output.

    A missing reward is None. Raises _ProgramError unless the reward is finite and given once.
    """
    last_line = output.strip().rpartition("\n")[2]
    try:
        printed = json.loads(last_line, object_pairs_hook=make_object)
    except RepeatedKeyError as error:
        raise _ProgramError(f"ValueError: the last line of the program's output: {error}") from None
    except (ValueError, RecursionError):  # the last line may be the model's own text
        return None, None
    turn_rewards = None
    if isinstance(printed, dict):
        turn_rewards = printed.get("turn_rewards")
        printed = printed.get("reward")
        if printed is None:
            return None, turn_rewards
    # Any JSON may be in the last line, such as a list or a number in quotes. Then there is no reward.
    elif isinstance(printed, bool) or not isinstance(printed, int | float):
        return None, None
    return _check_reward(printed), turn_rewards


def _make_trajectory(
    task: Task,
    session: Session,
    failure: str | None,
    turn_rewards: tuple[tuple[int, float], ...],
    config: AgentConfig,
    metrics: Mapping[str, float],
    *,
    engine_seconds: float,
    environment_seconds: float,
) -> Trajectory:
    """Return the trajectory recorded by a session, without a reward."""
    answers = session.answers
    calls = [answer.call for answer in answers]
    ended: Ended = "done"
    if failure is not None:
        ended = "error"
    elif calls and calls[-1].completion.finish_reason == "length":
        ended = "length"
    trained_indices = trained_answers(answers, config.credit, config.untrained_kinds)
    session.counts["untrained_tokens"] += sum(
        answer.num_sampled_tokens for index, answer in enumerate(answers) if index not in trained_indices
    )
    counts = {name: float(session.counts[name]) for name in COUNTS}
    return make_trajectory(
        task,
        calls,
        [answer.completion_text for answer in answers],
        _list_new_messages(answers),
        ended=ended,
        failure=failure,
        is_in_thoughts=bool(answers) and answers[-1].is_in_thoughts,
        turn_rewards=turn_rewards,
        callers=tuple(answer.caller for answer in answers),
        trained=trained_indices,
        metrics=counts | {"model_calls": float(len(calls)), **metrics},
        engine_seconds=engine_seconds,
        environment_seconds=environment_seconds,
    )


def _list_new_messages(answers: Sequence[Answer]) -> list[Sequence[Message]]:
    """Return the new messages of each answer's prompt: those after the earlier answer that it continues, else all."""
    answers_by_number = {answer.number: answer for answer in answers}
    new_messages: list[Sequence[Message]] = []
    for answer in answers:
        continued = None if answer.continued is None else answers_by_number.get(answer.continued)
        num_known = 0 if continued is None else len(continued.prompt_messages) + 1
        new_messages.append(answer.prompt_messages[num_known:])
    return new_messages


def _make_sample(problem: Problem, session: Session) -> Sample:
    answers = session.answers
    if not answers:
        # The program made no call. Reward functions score an empty completion.
        empty_completion = empty_call(problem).completion
        return Sample.of(problem, empty_completion, "", prompt_messages=problem.messages, turn=1, is_in_thoughts=False)
    last_answer = answers[-1]
    return Sample.of(
        problem,
        last_answer.call.completion,
        last_answer.text,
        prompt_messages=last_answer.prompt_messages or problem.messages,
        turn=len(answers),
        is_in_thoughts=last_answer.is_in_thoughts,
    )
