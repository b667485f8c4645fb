"""Spans of attempts for OpenTelemetry: one for each attempt, with its model calls, tools and reward within.

Attributes named `gen_ai.` follow OpenTelemetry's conventions for generative AI, all others begin with `megarl.`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Status, StatusCode, set_span_in_context

from megarl.rewards.scoring.http_rewards import COUNTED_FOR
from megarl.rollout.attempt import Task
from megarl.rollout.engine_requests import Generates
from megarl.types import Completion, Request, Trajectory

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


@dataclass(frozen=True, slots=True)
class _Call:
    """A finished model call: its times in Unix nanoseconds and its completion."""

    began: int
    ended: int
    num_prompt_tokens: int
    completion: Completion


class AttemptSpan:
    """Span of one attempt. It wraps the attempt's engines, to measure the model calls."""

    def __init__(self, tracer: Tracer, task: Task, pool: Generates) -> None:
        """Begin the span now."""
        self._tracer, self._task, self._pool = tracer, task, pool
        self._calls: list[_Call] = []
        self._scoring_began: int | None = None
        self._span = tracer.start_span(
            "attempt",
            attributes={
                "megarl.environment": task.environment,
                "megarl.problem": task.problem.index,
                "megarl.group": task.group,
                "megarl.attempt": task.number,
                "megarl.purpose": COUNTED_FOR.get(),
            },
        )

    async def generate(self, request: Request, *, affinity: str | None = None, is_last: bool = False) -> Completion:
        """Sample one completion, and note its times; see `EnginePool.generate`."""
        began = time.time_ns()
        completion = await self._pool.generate(request, affinity=affinity, is_last=is_last)
        self._calls.append(_Call(began, time.time_ns(), len(request.prompt_token_ids), completion))
        return completion

    def forget(self, affinity: str) -> None:
        """Forget a finished trajectory; see `EnginePool.forget`."""
        self._pool.forget(affinity)

    @property
    def seconds_paused(self) -> float:
        """Total seconds for which the engine pool has been paused so far."""
        return self._pool.seconds_paused

    def begin_scoring(self) -> None:
        """Note that the reward functions begin now."""
        self._scoring_began = time.time_ns()

    def end(self, trajectory: Trajectory) -> None:
        """End the span with the attempt's result."""
        now = time.time_ns()
        self._add_children(trajectory, now)
        self._span.set_attributes(_attributes(trajectory))
        if trajectory.ended == "error":
            self._span.set_status(Status(StatusCode.ERROR, trajectory.failure))
        self._span.end(now)

    def abandon(self, error: BaseException) -> None:
        """End the span of an attempt without a result: it was cancelled, or the run failed."""
        self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._span.end()

    def _add_children(self, trajectory: Trajectory, now: int) -> None:
        """Add spans of the model calls, of the environment's answers between them, and of the scoring."""
        last = now if self._scoring_began is None else self._scoring_began
        # An attempt may fail before its first call; then there is nothing to pair.
        next_begins = [*(call.began for call in self._calls[1:]), last][: len(self._calls)]
        for number, (call, next_began) in enumerate(zip(self._calls, next_begins, strict=True)):
            completion = call.completion
            self._add(
                "chat",
                call.began,
                call.ended,
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.usage.input_tokens": call.num_prompt_tokens,
                    "gen_ai.usage.output_tokens": len(completion.token_ids),
                    "gen_ai.response.finish_reasons": [completion.finish_reason],
                    "megarl.turn": number,
                    "megarl.cached_tokens": completion.num_cached,
                },
            )
            # Answers of the environment to this completion; empty for a single turn.
            answers = trajectory.messages[number + 1] if number + 1 < len(trajectory.messages) else ()
            # Calls of an agent may overlap: then there is no time between them.
            if answers and next_began > call.ended:
                tools = [str(answer.get("name", "")) for answer in answers if answer.get("role") == "tool"]
                name = "execute_tool" if tools else "environment"
                self._add(name, call.ended, next_began, {"megarl.turn": number, "megarl.tools": tools})
        if self._scoring_began is not None:
            self._add("reward", self._scoring_began, now, {})

    def _add(self, name: str, began: int, ended: int, attributes: Mapping[str, Any]) -> None:
        context = set_span_in_context(self._span)
        span = self._tracer.start_span(name, context=context, start_time=began, attributes=dict(attributes))
        span.end(ended)


def _attributes(trajectory: Trajectory) -> dict[str, Any]:
    """Return the result of an attempt as attributes of a span. Unknown values are left out."""
    reward = trajectory.reward
    attributes = {
        "megarl.turns": trajectory.num_turns,
        "megarl.sampled_tokens": trajectory.num_sampled,
        "megarl.ended": trajectory.ended,
        "megarl.failure": trajectory.failure,
        "megarl.restarts": trajectory.restarts,
        "megarl.temperature": trajectory.temperature,
        "megarl.engine_seconds": trajectory.engine_seconds,
        "megarl.environment_seconds": trajectory.environment_seconds,
        "megarl.reward": None if reward is None else reward.score,
        "megarl.answer_correct": None if reward is None else reward.answer_correct,
        **{f"megarl.metrics.{name}": value for name, value in trajectory.metrics.items()},
    }
    return {name: value for name, value in attributes.items() if value is not None}
