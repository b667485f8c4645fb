"""One attempt at a problem: policy and environment take turns until one of them is done."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from megarl.data.dialogue import Dialogue
from megarl.environments import Environment, EnvironmentUnavailableError, Message, Step
from megarl.environments.process_pool import EnvironmentProcessError, RaisedError
from megarl.rewards.calling import Sample
from megarl.rewards.scores import verdict_by_value
from megarl.rewards.worker import Scored
from megarl.rollout.course import Course, History
from megarl.rollout.parts import seed_of
from megarl.rollout.pool import Generates
from megarl.rollout.stitch import ModelCall, stitch
from megarl.rollout.waiting import TimedPool
from megarl.types import Completion, Ended, Problem, Request, Reward, SamplingSettings, Trajectory

if TYPE_CHECKING:
    from numpy.typing import NDArray

Result = TypeVar("Result")
Score = Callable[[Sample], Awaitable[Scored]]
"""Scores the last completion of an attempt by the recipe's reward functions."""


GRACE_SECONDS = 2.0
"""How long an environment may take to end after it was cancelled, or to close; then it is left to itself."""
_ATTEMPTS_AT_A_LOSS = 2
"""An attempt begins once more where its environment's process ended: a kill from outside is not the policy's fault."""
_TICK_SECONDS = 0.05
"""Between two looks at a limit that is near: it stays where it is while the engines are held."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of an attempt: `context_tokens` of prompt, completions and observations together, and `max_turns`.

    `truncated_turn`: a completion that reached its limit ends the attempt, or its turn is closed and the attempt goes
    on. The others are those of the recipe's `rollout.budget`; None: no limit.
    """

    context_tokens: int
    max_turns: int = 1
    truncated_turn: Literal["end", "close"] = "end"
    sampled_tokens: int | None = None
    tool_calls: int | None = None
    invalid_calls: int | None = None
    reply_tokens: int | None = None
    step_seconds: float | None = None
    seconds: float | None = None
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Task:
    """An attempt to make. `group` and `number` identify it, `environment` is the recipe's name of its environment.

    Attempts of other groups with the same numbers, at the same time, have another `prefix` of their names.
    All random numbers are a function of `seed`, the problem and `number`, not of the engine or the time.
    """

    environment: str
    problem: Problem
    group: int
    number: int
    seed: str
    sampling: SamplingSettings
    prefix: str = ""

    @property
    def name(self) -> str:
        return f"{self.prefix}{self.group}.{self.number}"


_UNANSWERED = Completion("", np.zeros(0, np.int64), np.zeros(0, np.float32), "error", np.zeros(0, np.int32))
"""The completion of an attempt that has none."""


class _AttemptError(Exception):
    """An error that ends an attempt; its text is the kind of error, a colon and the reason."""


@dataclass(slots=True)
class _Clock:
    """The times that an attempt is held to, by the event loop's time in seconds.

    The engines are no slower for being held: that time is not the attempt's.
    """

    budget: Budget
    now: Callable[[], float]
    started: float
    seconds_held: Callable[[], float] = lambda: 0.0
    """Of the engines, since the attempt began."""
    step_started: float | None = None
    """When the environment began to answer; None while it is not asked."""
    answered_seconds: float = 0.0
    """Of the environment's answers before."""
    is_stopped: bool = False
    """The attempt is over, whatever its environment still does."""

    @property
    def environment_seconds(self) -> float:
        """How long the environment was asked so far."""
        return self.answered_seconds + (0.0 if self.step_started is None else self.now() - self.step_started)

    @property
    def seconds_left(self) -> float | None:
        """How long to wait until the nearest limit may be reached; None: there is none."""
        ends = [end for end in (self._attempt_ends, self._step_ends) if end is not None]
        # An environment that is not asked now may be from now on.
        if self._step_ends is None and self.budget.step_seconds is not None:
            ends.append(self.now() + self.budget.step_seconds)
        return max(_TICK_SECONDS, min(ends) - self.now()) if ends else None

    @property
    def over(self) -> Literal["attempt", "step"] | None:
        """Which limit is reached."""
        now = self.now()
        if self._attempt_ends is not None and now >= self._attempt_ends:
            return "attempt"
        return "step" if self._step_ends is not None and now >= self._step_ends else None

    @property
    def _attempt_ends(self) -> float | None:
        return None if self.budget.seconds is None else self.started + self.budget.seconds + self.seconds_held()

    @property
    def _step_ends(self) -> float | None:
        limit = self.budget.step_seconds
        return None if limit is None or self.step_started is None else self.step_started + limit

    async def timed(self, method: Callable[..., Awaitable[Any]], *given: object) -> Any:
        """Await an environment's method. Raises _AttemptError for whatever it raises, and where its time is over."""
        self.step_started = self.now()
        try:
            return await method(*given)
        except EnvironmentUnavailableError:
            raise
        except (Exception, SystemExit) as error:
            raise _AttemptError(_failure(error)) from error
        finally:
            self.answered_seconds = self.environment_seconds
            self.step_started = None
            if self.is_stopped:  # it was cancelled and went on
                raise _AttemptError("Timeout: the attempt is over")


async def attempt(
    task: Task,
    make_environment: Callable[[], Environment],
    pool: Generates,
    budget: Budget,
    dialogue: Dialogue,
    score: Score,
    history: History = "append",
    *,
    is_followed: bool = False,
) -> Trajectory:
    """Start, sample, step the environment, observe, until it is done or the budget is spent; then score.

    Where the environment raises, hangs or gives what it must not, or the engine refuses a request, the trajectory ended
    with `error`: the tokens until then, no reward, and why in `failure`. It waits for nothing longer than the budget
    allows, for an environment that ignores its cancellation neither. `is_followed` as of `TimedPool`.
    """
    now = asyncio.get_running_loop().time
    held_before = pool.seconds_held
    clock = _Clock(budget, now, now(), lambda: pool.seconds_held - held_before)
    engines = TimedPool(pool, is_followed=is_followed)
    restarts = 0
    while True:
        course = Course(dialogue, history, task.problem.messages, budget.reply_tokens)
        try:
            ended, failure = await _watched(task, make_environment, engines, course, clock)
            break
        except EnvironmentUnavailableError as error:
            most = budget.attempts
            if isinstance(error, EnvironmentProcessError):
                most = max(most, _ATTEMPTS_AT_A_LOSS)
            if restarts + 1 >= most:
                ended, failure = "error", _failure(error)
                break
            restarts += 1
        finally:
            pool.forget(task.name)
    calls, steps = course.calls, course.steps
    texts = [turn.completion for turn in course.turns]
    trajectory = unscored(
        task,
        calls,
        texts,
        course.shown(),
        ended=ended,
        failure=failure,
        turn_rewards=tuple(
            (number, float(step.reward)) for number, step in enumerate(steps) if step.reward is not None
        ),
        metrics=_summed([step.metrics for step in steps]),
        restarts=restarts,
        engine_seconds=engines.seconds,
        environment_seconds=clock.environment_seconds,
    )
    if failure is not None:
        return trajectory
    if trajectory.turn_rewards:
        return replace(trajectory, reward=_of_steps(steps))
    sample = Sample.of(
        task.problem,
        calls[-1].completion if calls else _UNANSWERED,
        texts[-1] if texts else "",
        prompt_messages=course.before_last(),
        turn=max(len(calls), 1),
    )
    scored = await score(sample)
    return replace(trajectory, reward=scored.kept_reward, failure=scored.failure)


async def _watched(
    task: Task, make_environment: Callable[[], Environment], pool: Generates, course: Course, clock: _Clock
) -> tuple[Ended, str | None]:
    """Take turns within the limits of time, and close the environment. Returns why it ended and the failure, if any.

    A task of its own takes the turns: what waits for it can give it up. Raises EnvironmentUnavailableError.
    """
    try:
        environment = make_environment()
    except EnvironmentUnavailableError:
        raise
    except (Exception, SystemExit) as error:
        return "error", _failure(error)
    turns = asyncio.create_task(_take_turns(task, environment, pool, course, clock))
    turns.add_done_callback(lambda task: task.cancelled() or task.exception())  # that of one left is of no interest
    over: Literal["attempt", "step"] | None = None
    try:
        while not turns.done() and (over := clock.over) is None:
            await asyncio.wait({turns}, timeout=clock.seconds_left)
    finally:
        if not turns.done():
            clock.is_stopped = True
        closing = await _ended_or_left(turns, environment)
    if over == "step":
        return "error", f"Timeout: the environment's answer took longer than {clock.budget.step_seconds:g} seconds"
    if over == "attempt":
        return ("error", closing) if closing else ("seconds", None)
    try:
        ended = turns.result()
    except _AttemptError as error:
        return "error", str(error)
    except asyncio.CancelledError:
        return "error", "CancelledError: the environment was cancelled from within"
    return ("error", closing) if closing else (ended, None)


async def _ended_or_left(turns: asyncio.Task[Ended], environment: Environment) -> str | None:
    """Cancel what takes the turns, where it still does, and close the environment; what does not end is left.

    Returns what went wrong in closing.
    """
    if not turns.done():
        turns.cancel()
        await asyncio.wait({turns}, timeout=GRACE_SECONDS)
    closing = asyncio.create_task(_closed(environment))
    await asyncio.wait({closing}, timeout=GRACE_SECONDS)
    if not closing.done():
        closing.cancel()
        return f"Timeout: the environment took longer than {GRACE_SECONDS:g} seconds to close"
    return None if closing.cancelled() else closing.result()


async def _closed(environment: Environment) -> str | None:
    """Close the environment. Returns what went wrong."""
    try:
        await environment.close()
    except (Exception, SystemExit) as error:
        return _failure(error)
    return None


async def _take_turns(task: Task, environment: Environment, pool: Generates, course: Course, clock: _Clock) -> Ended:
    """Fill `course` turn by turn. Returns why there is no further turn, raises _AttemptError."""
    budget = clock.budget
    seed = seed_of(task.seed, task.problem.index, task.number, "reset")
    start = await clock.timed(environment.reset, task.problem, seed)
    _told(course.start, start, task.problem)
    num_sampled = num_calls = num_invalid = 0
    for number in range(budget.max_turns):
        token_ids = course.prompt
        room = budget.context_tokens - len(token_ids)
        if budget.sampled_tokens is not None:
            room = min(room, budget.sampled_tokens - num_sampled)
        if room <= 0:
            return "length"
        is_last = number + 1 == budget.max_turns
        sampling = (
            task.sampling if room >= task.sampling.max_new_tokens else replace(task.sampling, max_new_tokens=room)
        )
        request = Request(f"{task.name}.{number}", token_ids, sampling, call_seed(task, token_ids, course.calls))
        completion = await pool.generate(request, affinity=task.name, is_last=is_last)
        if completion.finish_reason == "error":
            raise _AttemptError(f"Refused: {completion.error}")
        turn = course.take(completion, is_last=is_last)
        num_sampled += len(completion.token_ids)
        num_calls += len(turn.calls)
        if budget.tool_calls is not None and num_calls > budget.tool_calls:
            return "calls"
        step = _told(course.add, await clock.timed(environment.step, turn))
        is_cut = turn.finish_reason == "length"
        if is_cut and (step.done or budget.truncated_turn == "end"):
            return "length"
        if step.done:
            return "done"
        # A call that the turn's length cut is none of the policy's faults.
        for call in turn.calls[:-1] if is_cut else turn.calls:
            num_invalid = 0 if call.error is None else num_invalid + 1
        if budget.invalid_calls is not None and num_invalid >= budget.invalid_calls:
            return "invalid_calls"
        _told(course.observe, step)
    return "turns"


def _failure(error: BaseException) -> str:
    """The kind of an error, a colon, and its text."""
    return str(error) if isinstance(error, RaisedError) else f"{type(error).__name__}: {error}"


def _told(part: Callable[..., Result], *given: Any) -> Result:
    """The course takes an environment's answer. Raises _AttemptError where it is not what it must be."""
    try:
        return part(*given)
    except (TypeError, ValueError) as error:
        raise _AttemptError(_failure(error)) from error


def unanswered(problem: Problem) -> ModelCall:
    """A call whose segment is the problem's prompt alone, fully masked."""
    return ModelCall(np.array(problem.prompt_token_ids, np.int32), _UNANSWERED)


def unscored(
    task: Task,
    calls: Sequence[ModelCall],
    texts: Sequence[str],
    messages: Sequence[Sequence[Message]],
    *,
    ended: Ended,
    failure: str | None,
    metrics: Mapping[str, float],
    turn_rewards: tuple[tuple[int, float], ...] = (),
    restarts: int = 0,
    engine_seconds: float,
    environment_seconds: float,
) -> Trajectory:
    """The trajectory of an attempt with these model calls, without a reward yet.

    `texts` are those of the completions, `messages` those that were new before each and after the last.
    """
    return Trajectory(
        environment=task.environment,
        problem=task.problem,
        group=task.group,
        number=task.number,
        segments=stitch(calls or [unanswered(task.problem)]),
        reward=None,
        failure=failure,
        texts=tuple(texts),
        messages=tuple(tuple(map(_as_json, new)) for new in messages),
        ended=ended,
        turn_rewards=turn_rewards,
        metrics=metrics,
        restarts=restarts,
        temperature=task.sampling.temperature,
        engine_seconds=engine_seconds,
        environment_seconds=environment_seconds,
    )


def _as_json(message: Message) -> dict[str, Any]:
    """A message as JSON values; what an environment of the driver's says that is none, as text."""
    try:
        return json.loads(json.dumps(dict(message), default=str, skipkeys=True))
    except (ValueError, RecursionError):
        return {"role": str(message["role"]), "content": "(no JSON)"}


def _of_steps(steps: Sequence[Step]) -> Reward:
    score = float(sum(step.reward for step in steps if step.reward is not None))
    known = [bool(step.answer_correct) for step in steps if step.answer_correct is not None]
    return Reward(score, format_valid=True, answer_correct=known[-1] if known else verdict_by_value(score))


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: float(sum(part.get(name, 0.0) for part in parts)) for name in names}


def call_seed(task: Task, token_ids: NDArray[np.int32], calls: Sequence[ModelCall]) -> int:
    """The seed of a model call: another one for every turn, whose draws would repeat those of the turn before.

    A function of the task, the prompt and how often the attempt sampled from this prompt before: not of the order in
    which calls of parallel attempts come.
    """
    drawn = task.seed, task.problem.index, task.number
    if not calls:
        return seed_of(*drawn)
    times_seen = sum(np.array_equal(call.prompt_token_ids, token_ids) for call in calls)
    return seed_of(*drawn, hashlib.sha256(token_ids.tobytes()).hexdigest(), times_seen)
