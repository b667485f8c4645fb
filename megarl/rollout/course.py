"""The course of an attempt: its messages, its model calls, and the prompt of the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megarl.data.dialogue import Dialogue
from megarl.environments import Message, Step, Turn
from megarl.environments.answers import checked_start, checked_step
from megarl.environments.tools import cut_in_the_middle
from megarl.rollout.stitch import ModelCall
from megarl.types import Completion, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

METRICS = {
    "tools/shortened": ("count", "replies longer than rollout.budget.reply_tokens, mean over attempts"),
}
"""Names, units and meanings, for `tracking.table`."""

History = Literal["append", "render"]
_TOKEN_CHARACTERS = 4
"""About so many characters are a token."""


@dataclass(slots=True)
class Course:
    """The course of an attempt so far: a turn for each model call, a step for each but perhaps the last.

    Its prompts are tokens [prompt]: those of the last call and its observation (`append`), or what the chat template
    writes of all messages (`render`). `render` keeps the tokens too while the template writes just what they are.
    """

    dialogue: Dialogue
    history: History
    opening: tuple[Message, ...]
    reply_tokens: int | None = None
    """Tokens that a tool's reply may have; None: no limit."""
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    calls: list[ModelCall] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    _rendered: str = ""
    """The text of `prompt`, where history is rendered."""

    def start(self, start: object, problem: Problem) -> None:
        """The first prompt. Raises TypeError for what is no start, ValueError where the template refuses it."""
        start = checked_start(start)
        self.opening, self.tools = tuple(start.messages), tuple(start.tools)
        if self.history == "render":
            self._rendered = self.dialogue.rendered(self.opening, self.tools)
        if self.opening == tuple(problem.messages) and not self.tools:
            self.prompt = np.array(problem.prompt_token_ids, np.int32)  # rendered and checked when the data were read
        else:
            self.prompt = self.dialogue.opening(self.opening, self.tools)

    def take(self, completion: Completion, *, is_last: bool = False) -> Turn:
        """The turn of a completion of `prompt`. Raises ConfigError where its calls' format is not known."""
        self.calls.append(ModelCall(self.prompt, completion))
        finish_reason: Literal["stop", "length"] = "length" if completion.finish_reason == "length" else "stop"
        number, token_ids = len(self.turns), completion.token_ids
        text = self.dialogue.text(token_ids)
        turn = Turn(number, text, finish_reason, completion=text, is_last=is_last)
        if self.tools:
            parsed = self.dialogue.parsed(self.prompt, token_ids, self.tools, turn=number)
            turn = replace(turn, text=parsed.text, reasoning=parsed.reasoning or "", calls=parsed.calls)
        self.turns.append(turn)
        return turn

    def add(self, step: object) -> Step:
        """The environment's answer to the last turn. Raises TypeError for what is none, ValueError for its numbers.

        Its metrics gain `tools/shortened`, where replies have a limit: how many of them were longer.
        """
        checked = checked_step(step)
        if self.reply_tokens is not None:
            messages = tuple(self._shortened(message, self.reply_tokens) for message in checked.messages)
            num_shortened = sum(old is not new for old, new in zip(checked.messages, messages, strict=True))
            metrics = {**checked.metrics, "tools/shortened": float(num_shortened)}
            checked = replace(checked, messages=messages, metrics=metrics)
        self.steps.append(checked)
        return checked

    def observe(self, step: Step) -> None:
        """The prompt after the environment's messages. Raises ValueError where the template refuses them."""
        if self.history == "render":
            before = self._rendered
            self._rendered = self.dialogue.rendered(self._messages(), self.tools)
            if not self._rendered.startswith(before + self.dialogue.written(self.calls[-1].completion.token_ids)):
                self.prompt = self.dialogue.encoded(self._rendered)
                return
        token_ids = self.calls[-1].token_ids.astype(np.int32)
        self.prompt = np.concatenate([token_ids, self.dialogue.observation(token_ids, step.messages, self.tools)])

    def before_last(self) -> tuple[Message, ...]:
        """The messages before the last completion, the policy's as it completed them."""
        messages = list(self.opening)
        for turn, step in zip(self.turns[:-1], self.steps, strict=False):
            messages += [{"role": "assistant", "content": turn.completion}, *step.messages]
        return tuple(messages)

    def _shortened(self, message: Message, max_tokens: int) -> Message:
        """The message, or a copy whose text is shorter where it is a tool's and too long."""
        text = message.get("content")
        if message["role"] != "tool" or not isinstance(text, str):
            return message
        short = shortened(
            text, lambda part: self.dialogue.num_tokens(part) <= max_tokens, guess=_TOKEN_CHARACTERS * max_tokens
        )
        return message if short == text else {**message, "content": short}

    def shown(self) -> tuple[tuple[Message, ...], ...]:
        """The messages that were new before each completion, and those after the last."""
        return self.opening, *(tuple(step.messages) for step in self.steps)

    def _messages(self) -> tuple[Message, ...]:
        """All messages, the policy's with reasoning and calls apart, as templates take them."""
        messages = list(self.opening)
        for turn, step in zip(self.turns, self.steps, strict=True):
            messages += [_message(turn), *step.messages]
        return tuple(messages)


def shortened(text: str, fits: Callable[[str], bool], guess: int) -> str:
    """The text, or nearly as much of its beginning and its end, around a marker, as fits.

    The search begins with `guess` characters and reads little more than what fits: a text may be very long.
    """
    size = guess
    while size < len(text) and fits(cut_in_the_middle(text, size)):
        size *= 2
    if size >= len(text) and fits(text):
        return text
    kept, too_many = 0, min(size, len(text))
    while too_many - kept > 1 + too_many // 50:
        size = (kept + too_many) // 2
        if fits(cut_in_the_middle(text, size)):
            kept = size
        else:
            too_many = size
    return cut_in_the_middle(text, kept)


def _message(turn: Turn) -> Message:
    """A turn of the policy as a message. Calls that cannot be carried out have no arguments there."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments or {})},
            }
            for call in turn.calls
        ]
    return message
