"""A conversation that grows turn by turn, as token ids: what stands there is never encoded again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.chat import encode, num_tokens, render, special_tokens
from megarl.data.tool_calls import ParsedTurn, parse, parser_of_template
from megarl.data.tool_formats import PARSERS
from megarl.types import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase as Tokenizer

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas in OpenAI's form, as `environments.Start` has them."""

_TURN = "\ufdd2"
"""Stands for an assistant's turn, or for the last argument of a call in it. Unicode keeps it out of all text."""
REASONING_OPENINGS = "<think>", "[THINK]"
REASONING_TOKENS = 8
"""Tokens of a prompt's end that tell whether it opens a block of reasoning."""
_QUESTION = {"role": "user", "content": "."}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The tokens that a chat template writes around an assistant's sampled turns.

    Contents of messages and schemas of tools become text, never special tokens (`data.chat`).
    """

    tokenizer: Tokenizer
    tool_parser: str | None = None
    """The format of tool calls, a key of `tool_calls.PARSERS`; None: that of the chat template."""

    def opening(self, messages: Messages, tools: Tools = ()) -> NDArray[np.int32]:
        """Token ids [prompt] of messages and tools up to the opening of the assistant's turn.

        Raises ValueError where the template refuses them.
        """
        return self.encoded(self.rendered(messages, tools))

    def rendered(self, messages: Messages, tools: Tools = ()) -> str:
        """The text of messages and tools up to the opening of the assistant's turn. Raises ValueError as `opening`."""
        return render(self.tokenizer, messages, generation_prompt=True, tools=tools)

    def encoded(self, text: str) -> NDArray[np.int32]:
        """Token ids [tokens] of rendered text."""
        return np.array(encode(self.tokenizer, text), np.int32)

    def num_tokens(self, text: str) -> int:
        """How many tokens a text has in a message. Raises ValueError where it cannot be written there."""
        return num_tokens(self.tokenizer, text)

    def written(self, token_ids: NDArray[np.int64]) -> str:
        """The text of a sampled turn as a template writes it, with special tokens, but without the one that ends it."""
        decoded = self.text_with_special_tokens(token_ids)
        special = special_tokens(self.tokenizer)
        last = None if special is None else [*special.finditer(decoded)][-1:]
        return decoded[: last[0].start()] if last and last[0].end() == len(decoded) else decoded

    def observation(self, token_ids: NDArray[np.int32], messages: Messages, tools: Tools = ()) -> NDArray[np.int32]:
        """Token ids that follow `token_ids` [tokens], which end with an assistant's turn, when `messages` answer it.

        They end with the opening of the next turn, and begin with the turn's end token where the turn, cut by its
        length, has none. All messages are rendered together: a template may join the results of several calls.
        Raises ValueError where the template does not write messages after a turn.
        """
        answers = list(takewhile(lambda message: message.get("role") == "tool", messages))
        following = self._after_calls(answers, messages, tools) if answers else None
        if following is None:
            following = self._after_turn(messages, tools)
        added = np.array(encode(self.tokenizer, following), np.int32)
        has_ended = len(token_ids) > 0 and len(added) > 0 and token_ids[-1] == added[0]
        return added[1:] if has_ended else added

    def text(self, token_ids: NDArray[np.int64]) -> str:
        """The text of sampled tokens, without special tokens."""
        decoded = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(decoded, str)
        return decoded

    def parsed(
        self, prompt_token_ids: NDArray[np.int32], token_ids: NDArray[np.int64], tools: Tools, *, turn: int
    ) -> ParsedTurn:
        """The text, reasoning and calls of sampled tokens [new_tokens], which follow the prompt's [prompt].

        `turn` is their turn's number. Raises ConfigError where no format is given and the template does not show it.
        """
        end_of_prompt = self.text_with_special_tokens(prompt_token_ids[-REASONING_TOKENS:]).rstrip()
        return parse(
            self.call_format,
            self.text_with_special_tokens(token_ids),
            tools,
            turn=turn,
            in_reasoning=True if end_of_prompt.endswith(REASONING_OPENINGS) else None,
        )

    @property
    def call_format(self) -> str:
        """The format of tool calls. Raises ConfigError where none is given and the template does not show it."""
        found = self.tool_parser or parser_of_template(str(self.tokenizer.chat_template))
        if found is None:
            raise ConfigError(
                "rollout.tool_parser: the chat template does not show how it writes tool calls; give one of "
                + ", ".join(PARSERS)
            )
        return found

    def text_with_special_tokens(self, token_ids: NDArray[Any]) -> str:
        """The text of token ids [tokens], special tokens by their names."""
        decoded = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        assert isinstance(decoded, str)
        return decoded

    def _after_turn(self, messages: Messages, tools: Tools) -> str:
        """The text that follows an assistant's turn without calls, its end token first."""
        turn = (_QUESTION, {"role": "assistant", "content": _TURN})
        text = render(self.tokenizer, (*turn, *messages), generation_prompt=True, tools=tools)
        _, found, following = text.partition(_TURN)
        if not found or _TURN in following:
            raise ValueError("the chat template does not write an assistant's turn once and as it is")
        return following

    def _after_calls(self, answers: Messages, messages: Messages, tools: Tools) -> str | None:
        """The text that follows a turn whose calls the first messages answer; None: the template writes no calls."""
        refusal: ValueError | None = None
        for turn in _turns_with_calls(answers):
            try:
                alone = render(self.tokenizer, (_QUESTION, turn), generation_prompt=False, tools=tools)
                whole = render(self.tokenizer, (_QUESTION, turn, *messages), generation_prompt=True, tools=tools)
            except ValueError as error:
                refusal = refusal or error
                continue
            _, found, following = whole.partition(_TURN)
            if not found:
                return None
            if _TURN in following:
                raise ValueError("the chat template writes the calls of an assistant's turn more than once")
            return following[self._num_of_call(alone.partition(_TURN)[2], following) :]
        assert refusal is not None
        raise refusal

    def _num_of_call(self, alone: str, following: str) -> int:
        """How many characters of `following` belong to the call whose last argument stands before it.

        A turn ends with the token that ends one without calls, or with the first special token behind the call; else,
        where only the next message's role ends it, where `alone`, the same turn at the end of a conversation, does.
        """
        special = special_tokens(self.tokenizer)
        if special is None:
            return len(alone)
        if (end := special.search(self._after_turn((_QUESTION,), ()))) and end.group() in alone:
            return following.index(end.group())
        first = special.search(alone)
        return first.start() if first else len(alone)


def _turns_with_calls(answers: Messages) -> Iterator[Mapping[str, Any]]:
    """Turns that make the calls which these messages answer, in the forms that templates take: most want the first.

    Some write one call a turn only, some want arguments as text.
    """
    for last in (len(answers), 1):
        for form in (dict, _as_text):
            calls = [
                {
                    "id": answer.get("tool_call_id", ""),
                    "type": "function",
                    "function": {"name": answer.get("name", "f"), "arguments": form({"x": _TURN if is_last else "."})},
                }
                for answer, is_last in zip(answers[:last], [*[False] * (last - 1), True], strict=True)
            ]
            yield {"role": "assistant", "content": "", "tool_calls": calls}


def _as_text(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)
