"""The conversation of one attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megarl.data.dialogue import Dialogue
from megarl.environments import Message, Step, Turn
from megarl.environments.tools import cut_in_the_middle, is_shortened
from megarl.environments.validation import copy_valid_start, copy_valid_step
from megarl.files.strict_json import shown
from megarl.rollout.stitch import ModelCall
from megarl.types import Completion, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray


History = Literal["append", "render"]
_TOKEN_CHARACTERS = 4
"""Assumed characters per token, where the search for a shortened reply's length starts."""


@dataclass(slots=True)
class AttemptConversation:
    """The messages of one attempt, its model calls, and the prompt of the next call.

    `prompt` are token ids [prompt]. With `history` = `append` they are the last call's tokens plus the observation.
    With `history` = `render` the chat template renders all messages anew. Sampled tokens are reused as long as the
    rendered text begins with their text.
    """

    dialogue: Dialogue
    history: History
    opening: tuple[Message, ...]
    """Messages before the first turn."""
    reply_tokens: int | None = None
    """Maximum tokens of a tool's reply. Longer replies are shortened. None: no limit."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools of the environment. Completions are searched for calls of them."""
    prompt_tools: tuple[Mapping[str, Any], ...] = ()
    """Tools shown in the prompt: the environment's tools. If it has none, the data record's tools."""
    prompt: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    calls: list[ModelCall] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    role: str | None = None
    """The role that the policy plays, as named by the environment."""
    first_state: str | None = None
    """The state in which the first turn acts, as named by the environment. GiGPO compares turns in equal states."""
    is_in_thoughts: bool = False
    """Whether the last completion was cut before its reasoning ended."""
    _rendered: str = ""
    """The text of the tokens in `prompt`. Empty with `history` = append."""

    def start(self, reset_result: object, problem: Problem) -> None:
        """Set the first prompt from `reset_result`, the value returned by the environment's reset.

        Raises TypeError if `reset_result` has a wrong type. Raises ValueError if the chat template rejects the
        messages, or if record and environment have different tools.
        """
        reset_result = copy_valid_start(reset_result)
        self.opening, self.tools = tuple(reset_result.messages), tuple(reset_result.tools)
        self.first_state, self.role = reset_result.state, reset_result.role
        if self.tools and problem.tools and self.tools != tuple(problem.tools):
            raise ValueError(
                f"the record has tools of its own, {shown([tool['function']['name'] for tool in problem.tools])}, and "
                "the environment begins with others; remove them from the record"
            )
        self.prompt_tools = self.tools or problem.tools
        if self.history == "render":
            self._rendered = self.dialogue.render_opening(self.opening, self.prompt_tools)
        if self.opening == tuple(problem.messages) and self.prompt_tools == problem.tools:
            self.prompt = np.array(problem.prompt_token_ids, np.int32)  # tokenised when the data were read
        else:
            self.prompt = self.dialogue.opening(self.opening, self.prompt_tools)

    def add_completion(self, completion: Completion, *, is_last: bool = False) -> Turn:
        """Add a completion of the current prompt, and return it as a turn.

        Raises ConfigError for an unknown tool-call format.
        """
        self.calls.append(ModelCall(self.prompt, completion))
        finish_reason: Literal["stop", "length"] = "length" if completion.finish_reason == "length" else "stop"
        turn_number, token_ids = len(self.turns), completion.token_ids
        text = self.dialogue.text(token_ids)
        turn = Turn(turn_number, text, finish_reason, completion=text, is_last=is_last)
        self.is_in_thoughts = self.dialogue.ends_in_thoughts(self.prompt, token_ids, text)
        if self.is_in_thoughts:
            # The completion was cut within its reasoning. The policy only considered the answers and calls in there, so
            # judge none.
            turn = replace(turn, text="", reasoning=text)
        elif self.tools:
            parsed = self.dialogue.parse_turn(self.prompt, token_ids, self.tools, turn=turn_number)
            turn = replace(turn, text=parsed.text, reasoning=parsed.reasoning or "", calls=parsed.calls)
        self.turns.append(turn)
        return turn

    def add_step(self, step: object) -> Step:
        """Check and store the environment's step after the last turn. Return it with shortened tool replies.

        The metric `tools/shortened` counts a reply once, even if the environment shortened it too. Raises TypeError if
        `step` has a wrong type, and ValueError for invalid numbers in it.
        """
        valid_step = copy_valid_step(step)
        if self.reply_tokens is not None:
            messages = tuple(self._shorten_reply(message, self.reply_tokens) for message in valid_step.messages)
            shortened_originals = [
                old for old, new in zip(valid_step.messages, messages, strict=True) if old is not new
            ]
            num_shortened_by_environment = valid_step.metrics.get("tools/shortened", 0.0)
            num_counted_twice = min(
                sum(is_shortened(str(message["content"])) for message in shortened_originals),
                num_shortened_by_environment,
            )
            metrics = {
                **valid_step.metrics,
                "tools/shortened": num_shortened_by_environment + len(shortened_originals) - num_counted_twice,
            }
            valid_step = replace(valid_step, messages=messages, metrics=metrics)
        self.steps.append(valid_step)
        return valid_step

    def append_observation(self, step: Step) -> None:
        """Append the environment's messages to the prompt. Raises ValueError if the chat template rejects them."""
        if self.history == "render":
            text_before = self._rendered
            self._rendered = self.dialogue.render_opening(self._messages(), self.prompt_tools)
            # A template may rewrite history, for example drop earlier reasoning. Then the prompt no longer begins with
            # the sampled tokens, and the whole text is tokenised again.
            if not self._rendered.startswith(
                text_before + self.dialogue.text_as_written(self.calls[-1].completion.token_ids)
            ):
                self.prompt = self.dialogue.encode_text(self._rendered)
                return
        token_ids = self.calls[-1].token_ids.astype(np.int32)
        self.prompt = np.concatenate(
            [token_ids, self.dialogue.observation(token_ids, step.messages, self.prompt_tools)]
        )

    def turn_states(self) -> tuple[str | None, ...]:
        """Return the state in which each turn acted; empty if the environment named none."""
        states = (self.first_state, *(step.state for step in self.steps))[: len(self.turns)]
        return states if any(state is not None for state in states) else ()

    def messages_before_last(self) -> tuple[Message, ...]:
        """Return all messages before the last completion, with each earlier completion as raw text."""
        messages = list(self.opening)
        for turn, step in zip(self.turns[:-1], self.steps, strict=False):
            # Reward functions expect raw completions, with reasoning and tool calls as text.
            messages += [{"role": "assistant", "content": turn.completion}, *step.messages]
        return tuple(messages)

    def _shorten_reply(self, message: Message, max_tokens: int) -> Message:
        """Return a tool's reply shortened to `max_tokens`. Other messages stay unchanged."""
        text = message.get("content")
        if message["role"] != "tool" or not isinstance(text, str):
            return message
        short = shorten_to_fit(
            text, lambda part: self.dialogue.num_tokens(part) <= max_tokens, guess=_TOKEN_CHARACTERS * max_tokens
        )
        return message if short == text else {**message, "content": short}

    def new_messages(self) -> tuple[tuple[Message, ...], ...]:
        return self.opening, *(tuple(step.messages) for step in self.steps)

    def _messages(self) -> tuple[Message, ...]:
        """Return all messages for the chat template, with reasoning and tool calls in separate fields."""
        messages = list(self.opening)
        for turn, step in zip(self.turns, self.steps, strict=True):
            messages += [_assistant_message(turn), *step.messages]
        return tuple(messages)


def shorten_to_fit(text: str, fits: Callable[[str], bool], guess: int) -> str:
    """Return a text unchanged if `fits(text)`. Otherwise replace its middle by a marker.

    The result is at most about 2 % shorter than necessary. The search starts at `guess` characters, to avoid reading a
    very long text as a whole.
    """
    num_characters = guess
    # Grow from the guess until a cut does not fit. Tokenising the whole of a very long text would take seconds.
    while num_characters < len(text) and fits(cut_in_the_middle(text, num_characters)):
        num_characters *= 2
    if num_characters >= len(text) and fits(text):
        return text
    longest_fitting, shortest_too_long = 0, min(num_characters, len(text))
    while (
        shortest_too_long - longest_fitting > 1 + shortest_too_long // 50
    ):  # Stop at 2 %: each further step tokenises the text again.
        num_characters = (longest_fitting + shortest_too_long) // 2
        if fits(cut_in_the_middle(text, num_characters)):
            longest_fitting = num_characters
        else:
            shortest_too_long = num_characters
    return cut_in_the_middle(text, longest_fitting)


def _assistant_message(turn: Turn) -> Message:
    """Return a turn of the policy as a chat message. A call with invalid arguments gets empty arguments."""
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
