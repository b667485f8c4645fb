"""Attempts by a program of the user's: an agent that talks to the endpoint, in a process group that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from megarl.config import Recipe
from megarl.config.rollout import AgentConfig
from megarl.data.chat import tokenizer_of
from megarl.environments import Agent, Message, environment_maker, is_agent
from megarl.rewards.calling import Sample
from megarl.rewards.scores import verdict_by_value
from megarl.rollout.attempt import Budget, Score, Task, unanswered, unscored
from megarl.rollout.pool import EnginePool, Generates
from megarl.rollout.waiting import TimedPool
from megarl.serving.codec import Codec
from megarl.serving.sessions import Answer, Limits, Session, Sessions
from megarl.types import Ended, Problem, Reward, SamplingSettings, Trajectory

if TYPE_CHECKING:
    from megarl.serving.endpoint import Endpoint

METRICS = {
    "environment/forks": (
        "count",
        "how often an agent's calls did not go on from the tokens they had, mean over attempts",
    ),
    "environment/abandoned_calls": ("count", "calls of an agent that nothing went on from, mean over attempts"),
    "environment/joined_retries": (
        "count",
        "calls that an agent's library sent again while they ran, mean over attempts",
    ),
    "environment/overridden_fields": (
        "count",
        "sampling fields of an agent's requests that the recipe decides, mean over attempts",
    ),
    "environment/refused_calls": ("count", "calls of an agent that were refused, mean over attempts"),
    "environment/untrained_tokens": (
        "tokens",
        "sampled tokens of an agent that nothing is learnt from, mean over attempts",
    ),
    "environment/model_calls": ("count", "completions of an agent, mean over attempts"),
    "environment/program_seconds": ("seconds", "how long an agent's program ran, mean over attempts"),
}
"""Names, units and meanings, for `tracking.table`."""

Result = TypeVar("Result")

COUNTS = (
    "forks", "abandoned_calls", "joined_retries", "overridden_fields", "refused_calls", "untrained_tokens",
)  # fmt: skip
"""The counts of a session that are metrics, as `environment/NAME`."""
INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE",
    "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
"""Variables of the driver's environment that each program gets. The driver's own may hold keys of trackers, judges and
hubs, which a model's program could print; `rollout.agent.environment` names further ones."""
_KEPT_BYTES = 1 << 16
_SHOWN = 400
_LEAVE_SECONDS = 2.0
_TICK_SECONDS = 0.05
"""Between two looks at a program's time when it is nearly over: it stands still while the engines are held."""


class _ProgramError(Exception):
    """An error that ends an attempt; its text is the kind of error, a colon and the reason."""


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """Runs the recipe's program or `Agent` once an attempt, each with a session of its own.

    The program finds OPENAI_BASE_URL, OPENAI_API_KEY, the variables of `INHERITED` and those that the recipe names in
    its environment, no others of the driver's. It finds on its standard input a JSON object
    with the problem's `messages`, `answer`, `record` and `index`, the attempt's `number` and its `seed`. The last line
    that it prints may be its reward, a JSON number or {"reward": number}; or it posts one to the endpoint; else the
    recipe's reward functions score the last completion. An exit code other than 0, or no end within its time, ends the
    attempt with an error. In any case its whole process group is killed then.
    """

    config: AgentConfig
    endpoint: Endpoint
    sessions: Sessions
    score: Score
    places: asyncio.Semaphore
    make_agent: Callable[[], Agent] | None = None

    async def attempt(self, task: Task, budget: Budget, pool: Generates) -> Trajectory:
        """Run the program against the endpoint, which has its completions of `pool`; the trajectory of its session."""
        began = time.monotonic()
        engines = TimedPool(pool)
        async with self.places:
            limits = Limits(budget.context_tokens, budget.max_turns, idle_seconds=self.config.timeout_seconds)
            seed = f"{task.seed} {task.problem.index} {task.number}"
            session = self.sessions.open(task.name, seed, task.sampling, limits, engines)
            failure: str | None = None
            reward: float | None = None
            started = time.monotonic()
            try:
                run = self._run if self.make_agent is None else self._ask
                reward = await run(task, session, pool)
            except _ProgramError as error:
                failure = str(error)
            finally:
                await self.sessions.end(session)
            seconds = time.monotonic() - started
        trajectory = _trajectory(
            task,
            session,
            failure,
            program_seconds=seconds,
            engine_seconds=engines.seconds,
            environment_seconds=time.monotonic() - began - engines.seconds_by_clock,
        )
        if failure is not None:
            return trajectory
        if (given := session.reward if session.reward is not None else reward) is not None:
            return replace(trajectory, reward=Reward(given, True, verdict_by_value(given)))
        scored = await self.score(_sample(task.problem, session))
        return replace(trajectory, reward=scored.kept_reward, failure=scored.failure)

    async def _ask(self, task: Task, session: Session, pool: Generates) -> float | None:
        """The reward of an `Agent`, if it gives one. Raises _ProgramError."""
        assert self.make_agent is not None
        try:
            run = self.make_agent().run(_told(task), self.endpoint.url_of(session), session.secret)
            reward = await self._ended(run, pool)
        except TimeoutError:
            raise _ProgramError(f"TimeoutError: it did not end within {self.config.timeout_seconds:g} s") from None
        except Exception as error:
            raise _ProgramError(f"{type(error).__name__}: {error}") from error
        return None if reward is None else _checked(reward)

    async def _run(self, task: Task, session: Session, pool: Generates) -> float | None:
        """The program's reward, if it says one. Raises _ProgramError."""
        names = (*INHERITED, *self.config.environment)
        environment = {
            **{name: os.environ[name] for name in names if name in os.environ},
            "OPENAI_BASE_URL": self.endpoint.url_of(session),
            "OPENAI_API_KEY": session.secret,
        }
        try:
            program = await asyncio.create_subprocess_exec(
                *self.config.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise _ProgramError(f"OSError: {self.config.command[0]}: {error.strerror}") from error
        assert program.stdin and program.stdout and program.stderr
        readers = [asyncio.create_task(_tail(stream)) for stream in (program.stdout, program.stderr)]
        try:
            with suppress(ConnectionError):
                program.stdin.write(json.dumps(_told(task)).encode() + b"\n")
                program.stdin.close()
            code = await self._ended(program.wait(), pool)
        except TimeoutError:
            text = f"TimeoutError: the program did not end within {self.config.timeout_seconds:g} s"
            raise _ProgramError(text) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            await program.wait()
            # A process that left the group may hold the pipes.
            await asyncio.wait(readers, timeout=_LEAVE_SECONDS)
            for reader in readers:
                reader.cancel()
        said, complaints = (reader.result() if reader.done() and not reader.cancelled() else b"" for reader in readers)
        if code != 0:
            shown = " ".join(complaints.decode(errors="replace").split())[-_SHOWN:]
            raise _ProgramError(f"ExitCode: the program ended with {code}: {shown}")
        return _reward(said)

    async def _ended(self, work: Coroutine[Any, Any, Result], pool: Generates) -> Result:
        """The result of work. Raises TimeoutError after its time, of which that of held engines is no part."""
        ends = time.monotonic() - pool.seconds_held + self.config.timeout_seconds
        ending = asyncio.create_task(work)
        try:
            while not ending.done():
                left = ends - time.monotonic() + pool.seconds_held
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait({ending}, timeout=max(_TICK_SECONDS, left))
        finally:
            ending.cancel()
            await asyncio.wait({ending}, timeout=_LEAVE_SECONDS)
        return ending.result()


@asynccontextmanager
async def agent_program(
    recipe: Recipe, pool: EnginePool, score: Score, sampling: SamplingSettings, tell: Callable[[str], object]
) -> AsyncIterator[AgentProgram | None]:
    """The recipe's program or `Agent`, before an endpoint that is open within; None where its environment is another.

    `sampling` is that of training; `tell` hears of what clients did that was not done as they asked.
    """
    name = recipe.rollout.environment
    if not is_agent(name):
        yield None
        return
    # Its web server takes a while to import, and few runs need it.
    from megarl.serving.endpoint import Endpoint

    longest = max(sampling.max_new_tokens, recipe.evaluation_sampling.max_new_tokens)
    context_tokens = recipe.data.max_prompt_tokens + longest
    codec = Codec(tokenizer_of(recipe.model), context_tokens, recipe.rollout.tool_parser)
    sessions = Sessions(pool, codec)
    endpoint = Endpoint(sessions, recipe.rollout.endpoint, model=recipe.name, sampling=sampling, notice=tell)
    try:
        await endpoint.start()
        config = recipe.rollout.agent
        make_agent = None
        if name != "command":
            make_agent = cast("Callable[[], Agent]", environment_maker(name, recipe.rollout.environment_kwargs))
        yield AgentProgram(config, endpoint, sessions, score, asyncio.Semaphore(config.max_processes), make_agent)
    finally:
        await endpoint.close()
        codec.close()


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """The end of a stream; nobody waits for who reads it."""
    kept = b""
    while read := await stream.read(_KEPT_BYTES):
        kept = (kept + read)[-_KEPT_BYTES:]
    return kept


def _told(task: Task) -> dict[str, Any]:
    problem = task.problem
    return {
        "messages": [dict(message) for message in problem.messages],
        "answer": problem.answer,
        "record": dict(problem.record),
        "index": problem.index,
        "number": task.number,
        "seed": task.seed,
    }


def _checked(reward: object) -> float:
    """A reward. Raises _ProgramError for one that is no finite number."""
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) < float("inf"):
        raise _ProgramError(f"ValueError: the program's reward is {reward!r:.80}, no finite number")
    return float(reward)


def _reward(said: bytes) -> float | None:
    """The reward in the last line of an output. Raises _ProgramError for one that is no finite number."""
    text = said.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if isinstance(found, dict):
        if "reward" not in found:
            return None
        found = found["reward"]
        if found is None:
            return None
    elif isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return _checked(found)


def _trajectory(
    task: Task,
    session: Session,
    failure: str | None,
    *,
    program_seconds: float,
    engine_seconds: float,
    environment_seconds: float,
) -> Trajectory:
    answers = session.answers
    calls = [answer.call for answer in answers]
    ended: Ended = "done"
    if failure is not None:
        ended = "error"
    elif calls and calls[-1].completion.finish_reason == "length":
        ended = "length"
    counts = {name: float(session.counts[name]) for name in COUNTS}
    return unscored(
        task,
        calls,
        [answer.completion_text for answer in answers],
        _new_messages(answers),
        ended=ended,
        failure=failure,
        metrics=counts | {"model_calls": float(len(calls)), "program_seconds": program_seconds},
        engine_seconds=engine_seconds,
        environment_seconds=environment_seconds,
    )


def _new_messages(answers: Sequence[Answer]) -> list[Sequence[Message]]:
    """The messages that were new before each answer: all, where its prompt does not go on from the answer before."""
    found: list[Sequence[Message]] = []
    before: Answer | None = None
    for answer in answers:
        num_known = 0
        if before is not None:
            known = before.call.token_ids
            if np.array_equal(answer.call.prompt_token_ids[: len(known)], known):
                num_known = len(before.prompt_messages) + 1
        found.append(answer.prompt_messages[num_known:])
        before = answer
    return found


def _sample(problem: Problem, session: Session) -> Sample:
    """The last completion, for reward functions."""
    answers = session.answers
    if not answers:
        nothing = unanswered(problem).completion
        return Sample.of(problem, nothing, "", prompt_messages=problem.messages, turn=1)
    last = answers[-1]
    return Sample.of(
        problem,
        last.call.completion,
        last.text,
        prompt_messages=last.prompt_messages or problem.messages,
        turn=len(answers),
    )
