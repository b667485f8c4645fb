"""One attempt at a problem."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from megarl.data.dialogue import Dialogue
from megarl.environments import Environment, EnvironmentUnavailableError, Message, Step
from megarl.environments.environment_pool import EnvironmentProcessError, RaisedError
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.results import verdict_by_value
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.attempt_messages import AttemptConversation, History
from megarl.rollout.requests.engine_requests import seed_of
from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import Caller, Completion, Ended, Problem, Request, Reward, SamplingSettings, Trajectory

if TYPE_CHECKING:
    from numpy.typing import NDArray

Result = TypeVar("Result")
Score = Callable[[Sample], Awaitable[Scored]]
"""Async function scoring the last completion of an attempt with the recipe's reward functions."""


GRACE_SECONDS = 2.0
"""Seconds for an environment to finish after it was cancelled or closed. Then it is abandoned."""
_MIN_TRIES_AFTER_LOSS = 2
"""Minimum number of tries if the environment's process died, even if the recipe allows fewer. The kernel may have
killed the process for lack of memory.
"""
_TICK_SECONDS = 0.05
"""Minimum seconds between two checks of a time limit. A single timer would not do: pauses of the engines extend the
limit.
"""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of an attempt (section `rollout.budget` of the recipe). None: no limit.

    `context_tokens` limits the sum of prompt, completions and observations. `max_turns` limits the number of
    completions. If a completion is cut at its token limit, `truncated_turn` = `end` ends the attempt, and `close` ends
    only the turn.
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
    """An attempt still to be made at a problem.

    `group` is the prompt's number, `number` the attempt's number within the group. Training and evaluation may use
    equal numbers, so `prefix` makes request ids unique. Random numbers depend only on `seed`, the problem and `number`.
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

    @property
    def key(self) -> str:
        """Return a name of the attempt, unique among running attempts, and the same after a resume."""
        return f"{self.seed} {self.problem.index} {self.number}"


_UNANSWERED = Completion("", np.zeros(0, np.int64), np.zeros(0, np.float32), "error", np.zeros(0, np.int32))
"""Completion of an attempt ended before its first model call."""


class _AttemptError(Exception):
    """Raised to end an attempt with an error. The exception's text is `KIND: reason`."""


@dataclass(slots=True)
class _Clock:
    """Measures an attempt's time limits, in seconds of the event loop's clock. Pauses of the engines do not count."""

    budget: Budget
    now: Callable[[], float]
    started: float
    seconds_paused: Callable[[], float] = lambda: 0.0
    """Function returning how many seconds the engines have paused since the attempt began."""
    step_started: float | None = None
    """Time when the current call of the environment began; None between calls."""
    finished_call_seconds: float = 0.0
    """Seconds spent in finished calls of the environment."""
    is_stopped: bool = False
    """Whether the attempt is over. Its environment may still be running."""

    @property
    def environment_seconds(self) -> float:
        return self.finished_call_seconds + (0.0 if self.step_started is None else self.now() - self.step_started)

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the nearest time limit; None: no limit."""
        limit_times = [limit_time for limit_time in (self._attempt_ends, self._step_ends) if limit_time is not None]
        # The next call of the environment may begin at once. Its limit may then be the nearest.
        if self._step_ends is None and self.budget.step_seconds is not None:
            limit_times.append(self.now() + self.budget.step_seconds)
        return max(_TICK_SECONDS, min(limit_times) - self.now()) if limit_times else None

    @property
    def exceeded_limit(self) -> Literal["attempt", "step"] | None:
        now = self.now()
        if self._attempt_ends is not None and now >= self._attempt_ends:
            return "attempt"
        return "step" if self._step_ends is not None and now >= self._step_ends else None

    @property
    def _attempt_ends(self) -> float | None:
        return None if self.budget.seconds is None else self.started + self.budget.seconds + self.seconds_paused()

    @property
    def _step_ends(self) -> float | None:
        limit = self.budget.step_seconds
        return None if limit is None or self.step_started is None else self.step_started + limit

    async def time_call(self, method: Callable[..., Awaitable[Any]], *arguments: object) -> Any:
        """Await a method of the environment, and add its duration to the environment's time.

        Raises _AttemptError if the method raises, or if the attempt ended meanwhile. Passes EnvironmentUnavailableError
        on.
        """
        self.step_started = self.now()
        try:
            return await method(*arguments)
        except EnvironmentUnavailableError:
            raise
        except (Exception, SystemExit) as error:
            raise _AttemptError(_failure_text(error)) from error
        finally:
            # `environment_seconds` includes the current call until `step_started` is reset.
            self.finished_call_seconds = self.environment_seconds
            self.step_started = None
            if self.is_stopped:  # the environment swallowed its cancellation
                raise _AttemptError("Timeout: the environment still ran after its attempt was cancelled")


async def attempt(
    task: Task,
    make_environment: Callable[[], Environment],
    engine: AttemptEngine,
    budget: Budget,
    dialogue: Dialogue,
    score: Score,
    history: History = "append",
) -> Trajectory:
    """Run one attempt and return its trajectory.

    Resets the environment, then alternates completions and environment steps. At the end scores the trajectory. The
    attempt ends when the environment is done or a limit of `budget` is reached. The time limit holds even if the
    environment ignores its cancellation.

    Errors and hangs of the environment, its invalid data and requests refused by the engine end the attempt with
    `error`. Then the trajectory has the tokens so far, no reward, and the reason in `failure`.
    """
    # Run the turns, and again if the environment was unavailable and the budget allows another try.
    now = asyncio.get_running_loop().time
    paused_before = engine.seconds_paused
    clock = _Clock(budget, now, now(), lambda: engine.seconds_paused - paused_before)
    restarts = 0
    while True:
        conversation = AttemptConversation(dialogue, history, task.problem.messages, budget.reply_tokens)
        try:
            ended, failure = await _run_with_limits(task, make_environment, engine, conversation, clock)
            break
        except EnvironmentUnavailableError as error:
            max_tries = budget.attempts
            if isinstance(error, EnvironmentProcessError):
                # The environment's process may have been killed from outside, so retry once even with attempts = 1.
                max_tries = max(max_tries, _MIN_TRIES_AFTER_LOSS)
            if restarts + 1 >= max_tries:
                ended, failure = "error", _failure_text(error)
                break
            restarts += 1
        finally:
            # Without this call, the pool's table of trajectories and replicas would only grow.
            engine.forget(task.name)
    trajectory = _make_unscored_trajectory(
        task, conversation, ended, failure, restarts, engine.seconds, clock.environment_seconds
    )
    if failure is not None:
        return trajectory
    # If the environment gives rewards, the reward functions are not used.
    if trajectory.turn_rewards:
        return replace(trajectory, reward=_sum_environment_rewards(conversation.steps))
    scored = await score(_make_sample(task, conversation))
    return replace(trajectory, reward=scored.trajectory_reward, failure=scored.failure)


def _make_unscored_trajectory(
    task: Task,
    conversation: AttemptConversation,
    ended: Ended,
    failure: str | None,
    restarts: int,
    engine_seconds: float,
    environment_seconds: float,
) -> Trajectory:
    """Return the trajectory of an attempt's last try, without a reward."""
    calls, steps = conversation.calls, conversation.steps
    texts = [turn.completion for turn in conversation.turns]
    return make_trajectory(
        task,
        calls,
        texts,
        conversation.new_messages(),
        ended=ended,
        failure=failure,
        turn_rewards=tuple(
            (turn_number, float(step.reward)) for turn_number, step in enumerate(steps) if step.reward is not None
        ),
        turn_states=conversation.turn_states(),
        role=conversation.role,
        metrics=_sum_by_name([step.metrics for step in steps]),
        is_in_thoughts=conversation.is_in_thoughts,
        tools=conversation.prompt_tools,
        restarts=restarts,
        engine_seconds=engine_seconds,
        environment_seconds=environment_seconds,
    )


def _make_sample(task: Task, conversation: AttemptConversation) -> Sample:
    """Return the last completion of an attempt as reward functions see it."""
    calls, turns = conversation.calls, conversation.turns
    return Sample.from_completion(
        task.problem,
        calls[-1].completion if calls else _UNANSWERED,
        turns[-1].completion if turns else "",
        # Reward functions see the whole conversation before the scored completion.
        prompt_messages=conversation.messages_before_last(),
        turn=max(len(calls), 1),
        is_in_thoughts=conversation.is_in_thoughts,
    )


async def _run_with_limits(
    task: Task,
    make_environment: Callable[[], Environment],
    engine: AttemptEngine,
    conversation: AttemptConversation,
    clock: _Clock,
) -> tuple[Ended, str | None]:
    """Run the turns of an attempt within its time limits, and close the environment.

    Returns why the attempt ended, and the description of a failure or None. Raises EnvironmentUnavailableError.
    """
    try:
        environment = make_environment()
    except EnvironmentUnavailableError:
        raise
    except (Exception, SystemExit) as error:
        return "error", _failure_text(error)
    # A separate task, because code of environments may block on its cancellation for ever.
    turns_task = asyncio.create_task(_take_turns(task, environment, engine, conversation, clock))
    # Retrieve the error of an abandoned task. Otherwise asyncio logs it as never retrieved.
    turns_task.add_done_callback(lambda task: task.cancelled() or task.exception())
    exceeded_limit: Literal["attempt", "step"] | None = None
    try:
        while not turns_task.done() and (exceeded_limit := clock.exceeded_limit) is None:
            await asyncio.wait({turns_task}, timeout=clock.seconds_left)
    finally:
        if not turns_task.done():
            # Set before cancelling: if the environment swallows its cancellation, `time_call` ends it at its next call.
            clock.is_stopped = True
        closing_error = await _end_and_close(turns_task, environment)
    if exceeded_limit == "step":
        return "error", f"Timeout: the environment's answer took longer than {clock.budget.step_seconds:g} seconds"
    # An attempt at its time limit ends normally: the tokens so far are scored. A step at its time limit is an error.
    if exceeded_limit == "attempt":
        return ("error", closing_error) if closing_error else ("seconds", None)
    try:
        ended = turns_task.result()
    except _AttemptError as error:
        return "error", str(error)
    except asyncio.CancelledError:
        return "error", "CancelledError: the environment was cancelled from within"
    return ("error", closing_error) if closing_error else (ended, None)


async def _end_and_close(turns_task: asyncio.Task[Ended], environment: Environment) -> str | None:
    """Cancel the turns of an attempt if they still run, and close its environment.

    Returns the error raised by closing, or None. Turns and closing are each abandoned after GRACE_SECONDS.
    """
    if not turns_task.done():
        turns_task.cancel()
        await asyncio.wait({turns_task}, timeout=GRACE_SECONDS)
    close_task = asyncio.create_task(_close(environment))
    await asyncio.wait({close_task}, timeout=GRACE_SECONDS)
    if not close_task.done():
        close_task.cancel()
        return f"Timeout: the environment took longer than {GRACE_SECONDS:g} seconds to close"
    return None if close_task.cancelled() else close_task.result()


async def _close(environment: Environment) -> str | None:
    """Close an environment. Return the text of its error, or None."""
    try:
        await environment.close()
    except (Exception, SystemExit) as error:
        return _failure_text(error)
    return None


async def _take_turns(
    task: Task, environment: Environment, engine: AttemptEngine, conversation: AttemptConversation, clock: _Clock
) -> Ended:
    """Add turns (a completion and an environment step each) to the conversation until the attempt ends.

    Returns the reason for the end. Raises _AttemptError for errors of environment and engine.
    """
    budget = clock.budget
    seed = seed_of(task.seed, task.problem.index, task.number, "reset")
    reset_result = await clock.time_call(environment.reset, _copy_problem(task.problem), seed)
    _call_with_environment_data(conversation.start, reset_result, task.problem)
    num_sampled = num_tool_calls = num_invalid_in_a_row = 0
    for turn_number in range(budget.max_turns):
        token_ids = conversation.prompt
        sampling = _limit_new_tokens(task.sampling, budget, len(token_ids), num_sampled)
        # The policy used up its context. This is no error, and ends like a completion cut at its token limit.
        if sampling is None:
            return "length"
        is_last = turn_number + 1 == budget.max_turns
        # Attempt name and turn number make the request id unique among running requests.
        request = Request(
            f"{task.name}.{turn_number}", token_ids, sampling, call_seed(task, token_ids, conversation.calls)
        )
        completion = await engine.generate(request, affinity=task.name, is_last=is_last)
        if completion.finish_reason == "error":
            raise _AttemptError(f"Refused: the engine rejects the request: {completion.error}")
        turn = conversation.add_completion(completion, is_last=is_last)
        num_sampled += len(completion.token_ids)
        num_tool_calls += len(turn.calls)
        if budget.tool_calls is not None and num_tool_calls > budget.tool_calls:
            return "calls"
        step = _call_with_environment_data(conversation.add_step, await clock.time_call(environment.step, turn))
        is_truncated = turn.finish_reason == "length"
        # A truncated final turn ends as `length`, even if the environment also says that it is done.
        if is_truncated and (step.done or budget.truncated_turn == "end"):
            return "length"
        if step.done:
            return "done"
        # The length limit may have cut the last call of a truncated turn. An incomplete last call is no invalid call.
        for call in turn.calls[:-1] if is_truncated else turn.calls:
            num_invalid_in_a_row = 0 if call.error is None else num_invalid_in_a_row + 1
        if budget.invalid_calls is not None and num_invalid_in_a_row >= budget.invalid_calls:
            return "invalid_calls"
        _call_with_environment_data(conversation.append_observation, step)
    return "turns"


def _limit_new_tokens(
    sampling: SamplingSettings, budget: Budget, num_prompt_tokens: int, num_sampled: int
) -> SamplingSettings | None:
    """Return the parameters of the next turn. None: the attempt has used up its context or its sampled tokens."""
    tokens_left = budget.context_tokens - num_prompt_tokens
    if budget.sampled_tokens is not None:
        tokens_left = min(tokens_left, budget.sampled_tokens - num_sampled)
    if tokens_left <= 0:
        return None
    return sampling if tokens_left >= sampling.max_new_tokens else replace(sampling, max_new_tokens=tokens_left)


def _failure_text(error: BaseException) -> str:
    return str(error) if isinstance(error, RaisedError) else f"{type(error).__name__}: {error}"


def _call_with_environment_data(method: Callable[..., Result], *data: Any) -> Result:
    """Pass data from the environment to a method. Raises _AttemptError if the data are invalid."""
    try:
        return method(*data)
    # OverflowError: a number beyond floats. RecursionError: lists within lists without end.
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _AttemptError(_failure_text(error)) from error


def _copy_problem(problem: Problem) -> Problem:
    """Return a copy of a problem, so that an environment changes it only for its own attempt."""
    names = ("messages", "answer", "record", "tools")
    return replace(problem, **{name: deepcopy(getattr(problem, name)) for name in names})


def empty_call(problem: Problem) -> ModelCall:
    return ModelCall(np.array(problem.prompt_token_ids, np.int32), _UNANSWERED)


def make_trajectory(
    task: Task,
    calls: Sequence[ModelCall],
    texts: Sequence[str],
    messages: Sequence[Sequence[Message]],
    *,
    ended: Ended,
    failure: str | None,
    metrics: Mapping[str, float],
    is_in_thoughts: bool,
    tools: tuple[Mapping[str, Any], ...] = (),
    turn_rewards: tuple[tuple[int, float], ...] = (),
    turn_states: tuple[str | None, ...] = (),
    role: str | None = None,
    callers: tuple[Caller, ...] = (),
    trained: Sequence[int] | None = None,
    restarts: int = 0,
    engine_seconds: float,
    environment_seconds: float,
) -> Trajectory:
    """Return the trajectory of an attempt's model calls, without a reward.

    `texts` are the completions. `messages` has the new messages before each completion, then those after the last one.
    `trained` are the indices of the calls to train; None: all.
    """
    is_empty = not calls or (trained is not None and not trained)
    return Trajectory(
        environment=task.environment,
        problem=task.problem,
        group=task.group,
        number=task.number,
        segments=stitch([empty_call(task.problem)]) if is_empty else stitch(calls, trained),
        reward=None,
        failure=failure,
        texts=tuple(texts),
        messages=tuple(tuple(map(_as_json, new)) for new in messages),
        callers=callers,
        ended=ended,
        turn_rewards=turn_rewards,
        turn_states=turn_states,
        role=role,
        metrics=metrics,
        is_in_thoughts=is_in_thoughts,
        tools=tools,
        restarts=restarts,
        temperature=task.sampling.temperature,
        engine_seconds=engine_seconds,
        environment_seconds=environment_seconds,
    )


def _as_json(message: Message) -> dict[str, Any]:
    """Return a message as JSON values. Values without a JSON form become text."""
    try:
        return json.loads(json.dumps(dict(message), default=str, skipkeys=True))
    except (ValueError, RecursionError):
        return {"role": str(message["role"]), "content": "(not valid JSON)"}


def _sum_environment_rewards(steps: Sequence[Step]) -> Reward:
    """Return the sum of the steps' rewards. The last verdict counts; without one, the value decides."""
    score = float(sum(step.reward for step in steps if step.reward is not None))
    verdicts = [bool(step.answer_correct) for step in steps if step.answer_correct is not None]
    return Reward(score, format_valid=True, answer_correct=verdicts[-1] if verdicts else verdict_by_value(score))


def _sum_by_name(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: float(sum(part.get(name, 0.0) for part in parts)) for name in names}


def call_seed(task: Task, token_ids: NDArray[np.int32], calls: Sequence[ModelCall]) -> int:
    """Return the sampling seed of a model call.

    The first call's seed is a hash of the attempt. A later seed also hashes the call's prompt `token_ids` [prompt] and
    the number of earlier calls with this prompt.
    """
    attempt_identity = task.seed, task.problem.index, task.number
    if not calls:
        return seed_of(*attempt_identity)
    num_equal_prompts = sum(np.array_equal(call.prompt_token_ids, token_ids) for call in calls)
    return seed_of(*attempt_identity, hashlib.sha256(token_ids.tobytes()).hexdigest(), num_equal_prompts)
