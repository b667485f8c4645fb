"""Model calls of a session, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megarl.environments import Message
from megarl.rollout.stitch import ModelCall
from megarl.serving.conversation import answer_message
from megarl.types import Caller

MAIN = Caller()


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A finished model call. `number` counts the session's calls by their starts.

    `text` is the answer without reasoning and tool calls, `completion_text` includes both. `calls` are the tool calls
    as (id, name, arguments as text). `is_in_thoughts`: the completion ended before its thoughts were closed.
    `continued` is the number of the earlier call that this conversation continues; None: it begins a new one.
    """

    number: int
    call: ModelCall
    text: str
    completion_text: str
    is_in_thoughts: bool
    prompt_messages: tuple[Message, ...] = ()
    reasoning: str | None = None
    calls: tuple[tuple[str, str, str], ...] = ()
    caller: Caller = MAIN
    continued: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.call.prompt_token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        return len(self.call.completion.token_ids)

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        if self.calls:
            return "tool_calls"
        return "length" if self.call.completion.finish_reason == "length" else "stop"

    @property
    def message(self) -> Message:
        return answer_message(self.text, self.reasoning, self.calls)


@dataclass(slots=True, eq=False)
class ModelCallUnderWay:
    """A model call in progress. Several HTTP requests may wait for it: the first one and its repeats.

    `number` counts the session's calls by their starts, from 1. `remember` enters the answer into the session's
    history. `num_received` requests got the answer. `is_continued`: a later call's messages contain the answer.
    """

    number: int
    task: asyncio.Task[Answer]
    remember: Callable[[Answer], None]
    num_waiting: int = 0
    num_received: int = 0
    is_remembered: bool = False
    is_continued: bool = False

    @property
    def is_joinable(self) -> bool:
        """Whether a repeated request can get this call's answer: an aborted call has none."""
        return not self.task.cancelled() and not self.task.cancelling()

    @property
    def is_delivered(self) -> bool:
        return self.num_received > 0 or self.is_continued

    @property
    def lacks_delivery(self) -> bool:
        """Whether this call's answer, present or future, has reached no client yet."""
        has_failed = self.task.done() and self.task.exception() is not None
        return not self.is_delivered and not has_failed
