"""One attempt at a problem: policy and environment take turns until one of them is done."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megarl.data.dialogue import Dialogue
from megarl.environments import Environment, Message, Start, Step, Turn
from megarl.rewards.calling import Sample
from megarl.rewards.worker import Scored
from megarl.rollout.pool import EnginePool
from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import Completion, Ended, Problem, Request, Reward, SamplingSettings, Trajectory

if TYPE_CHECKING:
    from numpy.typing import NDArray

Score = Callable[[Sample], Awaitable[Scored]]
"""Scores the last completion of an attempt by the recipe's reward functions."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of an attempt: tokens of prompt, completions and observations together, and the number of completions.

    `truncated_turn`: a completion that reached its limit ends the attempt, or its turn is closed and the attempt goes
    on.
    """

    context_tokens: int
    max_turns: int = 1
    truncated_turn: Literal["end", "close"] = "end"


@dataclass(frozen=True, slots=True)
class Task:
    """An attempt to make. `group` and `number` identify it, `environment` is the recipe's name of its environment.

    All random numbers are a function of `seed`, the problem and `number`, not of the engine or the time.
    """

    environment: str
    problem: Problem
    group: int
    number: int
    seed: str
    sampling: SamplingSettings

    @property
    def name(self) -> str:
        return f"{self.group}.{self.number}"


_UNANSWERED = Completion("", np.zeros(0, np.int64), np.zeros(0, np.float32), "error", -1)
"""The completion of an attempt that has none."""


class _AttemptError(Exception):
    """An error that ends an attempt; its text is the kind of error, a colon and the reason."""


@dataclass(slots=True)
class _Course:
    """The course of an attempt so far: a step for each model call but perhaps the last."""

    opening: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    calls: list[ModelCall] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def before_last(self, texts: Sequence[str]) -> tuple[Message, ...]:
        """The messages before the last completion; `texts` are the calls' completions."""
        messages = list(self.opening)
        for text, step in zip(texts[:-1], self.steps, strict=False):
            messages += [{"role": "assistant", "content": text}, *step.messages]
        return tuple(messages)


async def attempt(
    task: Task, environment: Environment, pool: EnginePool, budget: Budget, dialogue: Dialogue, score: Score
) -> Trajectory:
    """Start, sample, step the environment, observe, until it is done or the budget is spent; then score.

    Where the environment raises or the engine refuses a request, the trajectory ended with `error`: the tokens until
    then, no reward, and why in `failure`.
    """
    course = _Course(task.problem.messages)
    failure: str | None = None
    try:
        ended = await _take_turns(task, environment, pool, budget, dialogue, course)
    except _AttemptError as error:
        ended, failure = "error", str(error)
    finally:
        pool.forget(task.name)
        await environment.close()
    calls, steps = course.calls, course.steps
    texts = [dialogue.text(call.completion.token_ids) for call in calls]
    trajectory = Trajectory(
        environment=task.environment,
        problem=task.problem,
        group=task.group,
        number=task.number,
        segments=stitch(calls or [unanswered(task.problem)]),
        reward=None,
        failure=failure,
        text="\n\n".join(texts),
        ended=ended,
        turn_rewards=tuple((number, step.reward) for number, step in enumerate(steps) if step.reward is not None),
        metrics=_summed([step.metrics for step in steps]),
    )
    if failure is not None:
        return trajectory
    if trajectory.turn_rewards:
        return replace(trajectory, reward=_of_steps(steps))
    sample = Sample.of(
        task.problem,
        calls[-1].completion if calls else _UNANSWERED,
        texts[-1] if texts else "",
        prompt_messages=course.before_last(texts),
        turn=max(len(calls), 1),
    )
    scored = await score(sample)
    return replace(trajectory, reward=scored.reward, failure=scored.failure)


async def _take_turns(
    task: Task,
    environment: Environment,
    pool: EnginePool,
    budget: Budget,
    dialogue: Dialogue,
    course: _Course,
) -> Ended:
    """Fill `course` turn by turn. Returns why there is no further turn, raises _AttemptError."""
    start = await _answer_of(
        environment.reset(task.problem, _seed(task.seed, task.problem.index, task.number, "reset"))
    )
    if not isinstance(start, Start):
        raise _AttemptError(f"TypeError: reset gave {start!r:.80}, not a Start")
    course.opening, course.tools = tuple(start.messages), tuple(start.tools)
    token_ids = _opening(task, start, dialogue)
    for number in range(budget.max_turns):
        room = budget.context_tokens - len(token_ids)
        if room <= 0:
            return "length"
        request = Request(
            f"{task.name}.{number}",
            token_ids,
            replace(task.sampling, max_new_tokens=min(task.sampling.max_new_tokens, room)),
            call_seed(task, token_ids, course.calls),
        )
        completion = await pool.generate(request, affinity=task.name)
        if completion.finish_reason == "error":
            raise _AttemptError(f"Refused: {completion.error}")
        course.calls.append(ModelCall(token_ids, completion))
        is_cut = completion.finish_reason == "length"
        step = _checked(await _answer_of(environment.step(_turn(course, dialogue))))
        course.steps.append(step)
        if is_cut and (step.done or budget.truncated_turn == "end"):
            return "length"
        if step.done:
            return "done"
        token_ids = _observed(course, step, dialogue)
    return "turns"


def _turn(course: _Course, dialogue: Dialogue) -> Turn:
    """The last completion as the environment takes it. Raises ConfigError where its calls' format is not known."""
    number, call = len(course.calls) - 1, course.calls[-1]
    completion = call.completion
    finish_reason: Literal["stop", "length"] = "length" if completion.finish_reason == "length" else "stop"
    if not course.tools:
        return Turn(number, dialogue.text(completion.token_ids), finish_reason)
    parsed = dialogue.parsed(call.prompt_token_ids, completion.token_ids, course.tools, turn=number)
    return Turn(number, parsed.text, finish_reason, parsed.reasoning or "", parsed.calls)


def unanswered(problem: Problem) -> ModelCall:
    """A call whose segment is the problem's prompt alone, fully masked."""
    return ModelCall(np.array(problem.prompt_token_ids, np.int32), _UNANSWERED)


async def _answer_of(call: Awaitable[Any]) -> Any:
    """Await an environment's method. Raises _AttemptError for whatever it raises."""
    try:
        return await call
    except Exception as error:
        raise _AttemptError(f"{type(error).__name__}: {error}") from error


def _checked(step: Step) -> Step:
    if not isinstance(step, Step):
        raise _AttemptError(f"TypeError: step gave {step!r:.80}, not a Step")
    if step.reward is not None and not math.isfinite(step.reward):
        raise _AttemptError(f"ValueError: step gave the reward {step.reward}")
    return step


def _opening(task: Task, start: Start, dialogue: Dialogue) -> NDArray[np.int32]:
    if start.messages == task.problem.messages and not start.tools:
        return np.array(task.problem.prompt_token_ids, np.int32)  # rendered and checked when the data were read
    try:
        return dialogue.opening(start.messages, start.tools)
    except ValueError as error:
        raise _AttemptError(f"ValueError: {error}") from error


def _observed(course: _Course, step: Step, dialogue: Dialogue) -> NDArray[np.int32]:
    """The next prompt: the tokens of the last call, then those of the environment's messages; int32 [tokens]."""
    token_ids = course.calls[-1].token_ids.astype(np.int32)
    try:
        return np.concatenate([token_ids, dialogue.observation(token_ids, step.messages, course.tools)])
    except ValueError as error:
        raise _AttemptError(f"ValueError: {error}") from error


def _of_steps(steps: Sequence[Step]) -> Reward:
    score = sum(step.reward for step in steps if step.reward is not None)
    known = [step.answer_correct for step in steps if step.answer_correct is not None]
    return Reward(score, format_valid=True, answer_correct=known[-1] if known else score > 0)


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def call_seed(task: Task, token_ids: NDArray[np.int32], calls: Sequence[ModelCall]) -> int:
    """The seed of a model call: another one for every turn, whose draws would repeat those of the turn before.

    A function of the task, the prompt and how often the attempt sampled from this prompt before: not of the order in
    which calls of parallel attempts come.
    """
    drawn = task.seed, task.problem.index, task.number
    if not calls:
        return _seed(*drawn)
    times_seen = sum(np.array_equal(call.prompt_token_ids, token_ids) for call in calls)
    return _seed(*drawn, hashlib.sha256(token_ids.tobytes()).hexdigest(), times_seen)


def _seed(*parts: object) -> int:
    """A 31-bit hash of the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
