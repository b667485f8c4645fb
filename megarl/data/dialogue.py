"""Conversations that grow turn by turn, as token ids. Existing tokens are never encoded again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.chat import QUESTION, encode_rendered, num_tokens, render, special_token_pattern
from megarl.data.templates.message_names import unwritten_names, without_unwritten_names
from megarl.data.templates.written_texts import check_messages_written, check_tools_written
from megarl.data.tools.calls import ParsedTurn, parse, parser_of_template
from megarl.data.tools.formats import PARSERS
from megarl.thoughts import ALL_MARKS, MARKS, ends_in_thoughts
from megarl.types import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase as Tokenizer

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools in OpenAI's form."""

_TURN = "\ufdd2"
"""Placeholder for an assistant's turn, or for the last argument of its last tool call. No valid text has this
noncharacter."""
REASONING_OPENINGS = tuple(opening for opening, _ in MARKS)
REASONING_TOKENS = 8
"""The opening of a reasoning block is searched in this number of tokens at a prompt's end."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The tokens that a chat template writes around the assistant's sampled turns.

    Message contents and tool schemas become plain text, never special tokens (`data.chat`).
    """

    tokenizer: Tokenizer
    tool_parser: str | None = None
    """Format of tool calls, a key of `data.tools.formats.PARSERS`. None: the chat template shows it."""

    def opening(self, messages: Messages, tools: Tools = ()) -> NDArray[np.int32]:
        """Return the text of `render_opening` as token ids [prompt]. Raises the same errors."""
        return self.encode_text(self.render_opening(messages, tools))

    def render_opening(self, messages: Messages, tools: Tools = ()) -> str:
        """Return the text of messages and tools, up to the opening of the assistant's turn.

        Raises ValueError if the template fails on them, or leaves out a tool or a text. An earlier turn of the
        assistant may lose its reasoning. Names are left out if the template writes none: see `unwritten_names`.
        """
        messages = without_unwritten_names(self.tokenizer, messages)
        text = render(self.tokenizer, messages, generation_prompt=True, tools=tools)
        check_tools_written(tools, text)
        check_messages_written(messages, text)
        return text

    def unwritten_names(self, messages: Messages) -> list[Any]:
        """Return the names of messages that prompts lack, because the template writes no names for these roles."""
        return unwritten_names(self.tokenizer, messages)

    def without_unwritten_names(self, messages: Messages) -> tuple[Mapping[str, Any], ...]:
        return without_unwritten_names(self.tokenizer, messages)

    def encode_text(self, text: str) -> NDArray[np.int32]:
        return np.array(encode_rendered(self.tokenizer, text), np.int32)

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text inside a message. Raises ValueError if the text cannot be encoded."""
        return num_tokens(self.tokenizer, text)

    def text_as_written(self, token_ids: NDArray[np.int64]) -> str:
        """Return the text of a sampled turn [tokens] with special tokens, except its end token."""
        decoded = self.text_with_special_tokens(token_ids)
        special_pattern = special_token_pattern(self.tokenizer)
        matches = [] if special_pattern is None else [*special_pattern.finditer(decoded)]
        ends_with_special = bool(matches) and matches[-1].end() == len(decoded)
        return decoded[: matches[-1].start()] if ends_with_special else decoded

    def observation(self, token_ids: NDArray[np.int32], messages: Messages, tools: Tools = ()) -> NDArray[np.int32]:
        """Return the token ids [new_tokens] of `messages`, the answers to the turn at the end of `token_ids` [tokens].

        The result ends with the opening of the next turn. If the turn was cut at its length limit, the result begins
        with the turn's end token. All messages are rendered together, because a template may join the results of
        several tool calls. Raises ValueError if the template cannot write messages after a turn, or leaves out a text.
        """
        messages = without_unwritten_names(self.tokenizer, messages)
        # Templates render a turn with calls differently, so the turn before the answers must be rendered with calls.
        answers = list(takewhile(lambda message: message.get("role") == "tool", messages))
        text_after_turn = self._render_after_calls(answers, messages, tools) if answers else None
        if text_after_turn is None:
            text_after_turn = self._render_after_turn(messages, tools)
        check_messages_written(messages, text_after_turn)
        new_tokens = np.array(encode_rendered(self.tokenizer, text_after_turn), np.int32)
        return new_tokens[self._count_sampled_tokens(token_ids, new_tokens) :]

    def _count_sampled_tokens(self, token_ids: NDArray[np.int32], new_tokens: NDArray[np.int32]) -> int:
        """Return how many tokens at the beginning of `new_tokens` [tokens] the policy has sampled in `token_ids`
        [tokens].

        They are the turn's end token, and white space that the template writes before it, as Llama 2's does.
        """
        if not len(token_ids) or not len(new_tokens):
            return 0
        last_token = token_ids[-1]
        if last_token == new_tokens[0]:
            return 1
        special_pattern = special_token_pattern(self.tokenizer)
        if special_pattern is None or not special_pattern.fullmatch(self.text_with_special_tokens(token_ids[-1:])):
            return 0
        end_token_index = int((new_tokens == last_token).argmax())
        is_space = not self.text_with_special_tokens(new_tokens[:end_token_index]).strip()
        return end_token_index + 1 if new_tokens[end_token_index] == last_token and is_space else 0

    def text(self, token_ids: NDArray[np.int64]) -> str:
        """Return the text of tokens [tokens], without special tokens."""
        decoded = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(decoded, str)
        return decoded

    def parse_turn(
        self, prompt_token_ids: NDArray[np.int32], token_ids: NDArray[np.int64], tools: Tools, *, turn: int
    ) -> ParsedTurn:
        """Return text, reasoning and tool calls of a sampled turn [new_tokens] after the prompt [prompt].

        `turn` is the turn's number. Raises ConfigError if the format of tool calls is unknown.
        """
        return parse(
            self.call_format,
            self.text_with_special_tokens(token_ids),
            tools,
            turn=turn,
            # Some templates open the reasoning block in the prompt; then only its closing tag is sampled.
            in_reasoning=True if self._prompt_opens_thoughts(prompt_token_ids) else None,
        )

    def ends_in_thoughts(self, prompt_token_ids: NDArray[np.int32], token_ids: NDArray[np.int64], text: str) -> bool:
        """Return whether a completion ends before the model has closed its thoughts.

        `prompt_token_ids` are [prompt tokens], `token_ids` [new tokens]. `text` is the completion without special
        tokens.
        """
        special_pattern = special_token_pattern(self.tokenizer)
        # A reasoning mark that is a special token is missing in `text`, so decode again. That takes milliseconds.
        if special_pattern is not None and any(map(special_pattern.fullmatch, ALL_MARKS)):
            text = self.text_with_special_tokens(token_ids)
        return ends_in_thoughts(text, begins_in_thoughts=self._prompt_opens_thoughts(prompt_token_ids))

    def _prompt_opens_thoughts(self, prompt_token_ids: NDArray[np.int32]) -> bool:
        end_of_prompt = self.text_with_special_tokens(prompt_token_ids[-REASONING_TOKENS:]).rstrip()
        return end_of_prompt.endswith(REASONING_OPENINGS)

    @property
    def call_format(self) -> str:
        """Return the format of tool calls. Raises ConfigError if it is neither configured nor visible in the
        template.
        """
        name = self.tool_parser or parser_of_template(str(self.tokenizer.chat_template))
        if name is None:
            raise ConfigError(
                "rollout.tool_parser: the chat template does not reveal its format of tool calls; give one of "
                + ", ".join(PARSERS)
            )
        return name

    def text_with_special_tokens(self, token_ids: NDArray[Any]) -> str:
        """Return the text of token ids [tokens], with special tokens."""
        decoded = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        assert isinstance(decoded, str)
        return decoded

    def _render_after_turn(self, messages: Messages, tools: Tools) -> str:
        """Return the template's text after a turn without calls, from its end token on."""
        turn = (QUESTION, {"role": "assistant", "content": _TURN})
        text = render(self.tokenizer, (*turn, *messages), generation_prompt=True, tools=tools)
        _, separator, text_after_turn = text.partition(_TURN)
        if not separator or _TURN in text_after_turn:
            raise ValueError("the chat template does not write an assistant's turn exactly once and unchanged")
        return text_after_turn

    def _render_after_calls(self, tool_results: Messages, messages: Messages, tools: Tools) -> str | None:
        """Return the template's text after a turn with tool calls. `messages` begin with the calls' results.

        None: the template does not write tool calls.
        """
        first_error: ValueError | None = None
        # Some templates refuse several calls in a turn, so a turn with one call is tried next.
        for turn in _make_turns_with_calls(tool_results):
            try:
                text_without_messages = render(self.tokenizer, (QUESTION, turn), generation_prompt=False, tools=tools)
                text_with_messages = render(
                    self.tokenizer, (QUESTION, turn, *messages), generation_prompt=True, tools=tools
                )
            except ValueError as error:
                first_error = first_error or error
                continue
            _, separator, text_after_placeholder = text_with_messages.partition(_TURN)
            if not separator:
                return None
            if _TURN in text_after_placeholder:
                raise ValueError("the chat template writes the calls of an assistant's turn more than once")
            # `_TURN` stands for the call's last argument, so the text after it begins within the call: skip its rest.
            text_without_messages = text_without_messages.partition(_TURN)[2]
            return text_after_placeholder[self._find_end_of_call(text_without_messages, text_after_placeholder) :]
        assert first_error is not None
        raise first_error

    def _find_end_of_call(self, text_without_messages: str, text_after_placeholder: str) -> int:
        """Return the index in `text_after_placeholder` at which the turn's tool call ends.

        The placeholder is the call's last argument. `text_without_messages` is the text after it if the conversation
        ends with this turn. The call ends before the end token of a turn without calls, else before the first special
        token. Without special tokens, it ends where `text_without_messages` ends.
        """
        special_pattern = special_token_pattern(self.tokenizer)
        if special_pattern is None:
            return len(text_without_messages)
        end_of_turn = special_pattern.search(self._render_after_turn((QUESTION,), ()))
        if end_of_turn and end_of_turn.group() in text_without_messages:
            return text_after_placeholder.index(end_of_turn.group())
        first_special = special_pattern.search(text_without_messages)
        return first_special.start() if first_special else len(text_without_messages)


def _make_turns_with_calls(tool_results: Messages) -> Iterator[Mapping[str, Any]]:
    """Yield two variants of the assistant's turn before these tool results: with all their calls, and with one call.

    The second is for templates that refuse several calls in a turn.
    """
    for num_calls in (len(tool_results), 1):
        # The caller searches the end of the last call, so only this call has the placeholder.
        calls = [
            {
                "id": result.get("tool_call_id", ""),
                "type": "function",
                "function": {"name": result.get("name", "f"), "arguments": {"x": _TURN if is_last else "."}},
            }
            for result, is_last in zip(tool_results[:num_calls], [*[False] * (num_calls - 1), True], strict=True)
        ]
        yield {"role": "assistant", "content": "", "tool_calls": calls}
