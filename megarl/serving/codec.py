"""Conversion between messages and tokens, in a thread with its own tokenizer, so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from megarl.data.chat import encode_rendered, exceeds_token_limit
from megarl.data.dialogue import Dialogue
from megarl.data.tools.calls import ParsedTurn
from megarl.data.tools.schemas import ToolSchema, check_tools
from megarl.environments import Message
from megarl.rollout.stitch import ModelCall
from megarl.serving.conversation import Conversation
from megarl.serving.refusal import RequestError
from megarl.types import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase as Tokenizer

Result = TypeVar("Result")


class Decoded(NamedTuple):
    """A sampled completion as text.

    `turn` has its parts (text, reasoning, tool calls), `full_text` is everything without special tokens.
    `is_in_thoughts`: the completion ended before its thoughts were closed.
    """

    turn: ParsedTurn
    full_text: str
    is_in_thoughts: bool


class Codec:
    """Renders messages, and encodes and decodes tokens, for all sessions of an endpoint.

    Do not share the tokenizer: a fast tokenizer is not re-entrant. Tool calls are parsed in the format that the chat
    template shows, or with the parser `tool_parser` (`rollout.tool_parser`).
    """

    def __init__(self, tokenizer: Tokenizer, context_tokens: int, tool_parser: str | None = None) -> None:
        self._dialogue = Dialogue(tokenizer, tool_parser)
        self._context_tokens = context_tokens
        # One thread only: the tokenizer is never used twice at once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="endpoint_codec")

    async def encode_opening(self, conversation: Conversation) -> NDArray[np.int32]:
        """Return the token ids [prompt] of a conversation without earlier answers.

        Raises RequestError if the chat template refuses the messages, or if the prompt is too long.
        """
        messages, tools = conversation.messages, conversation.tools
        return await self._run_in_thread(lambda: self._dialogue.opening(messages, tools), messages)

    async def append_messages(
        self, token_ids: NDArray[np.int32], messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> NDArray[np.int32]:
        """Append the tokens of later `messages` to `token_ids` [tokens], which end with an assistant's turn.

        Raises RequestError as `encode_opening`.
        """
        added_ids = await self._run_in_thread(lambda: self._dialogue.observation(token_ids, messages, tools), messages)
        return np.concatenate([token_ids, added_ids])

    async def encode_text(self, text: str) -> NDArray[np.int32]:
        """Return the token ids [tokens] of a text prompt. Names of special tokens in it become special tokens."""
        messages = ({"role": "user", "content": text},)
        return await self._run_in_thread(
            lambda: np.array(encode_rendered(self._dialogue.tokenizer, text), np.int32), messages
        )

    async def parse_completion(self, call: ModelCall, tools: Sequence[ToolSchema], turn: int) -> Decoded:
        """Parse a sampled completion. Without `tools` the text is not searched for tool calls."""

        def parse_in_thread() -> Decoded:
            prompt, token_ids = call.prompt_token_ids, call.completion.token_ids
            text = self._dialogue.text(token_ids)
            is_in_thoughts = self._dialogue.ends_in_thoughts(prompt, token_ids, text)
            if not tools:
                return Decoded(ParsedTurn(text, None, ()), text, is_in_thoughts)
            return Decoded(self._dialogue.parse_turn(prompt, token_ids, tools, turn=turn), text, is_in_thoughts)

        return await self._run_in_thread(parse_in_thread)

    async def list_token_texts(self, token_ids: NDArray[np.int64]) -> list[str]:
        single_tokens = [token_ids[position : position + 1] for position in range(len(token_ids))]
        return await self._run_in_thread(
            lambda: [self._dialogue.text_with_special_tokens(token) for token in single_tokens]
        )

    def drop_unwritten_names(self, conversation: Conversation) -> tuple[Conversation, list[str]]:
        """Return a conversation without the names of messages that the template does not write, and these names."""
        names = self._dialogue.unwritten_names(conversation.messages)
        messages = self._dialogue.without_unwritten_names(conversation.messages)
        return (replace(conversation, messages=messages), names) if names else (conversation, names)

    def check_tools(self, tools: Sequence[ToolSchema]) -> None:
        """Raise RequestError for tools that are not JSON schemas, or if the format of tool calls is unknown."""
        if not tools:
            return
        try:
            check_tools(tools)
            # Raises ConfigError if the template shows no format for tool calls.
            _ = self._dialogue.call_format
        except (ValueError, ConfigError) as error:
            raise RequestError(f"tools: {error}", param="tools") from error

    def close(self) -> None:
        # No wait: a long tokenization must not delay the end of the run.
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run_in_thread(self, work: Callable[[], Result], messages: Sequence[Message] = ()) -> Result:
        """Run `work` in the codec's thread. Raises RequestError if `messages` are too long."""

        def check_lengths_and_work() -> Result:
            for message in messages:
                # The check reads only a small part of the text, so a huge text does not block the thread.
                if exceeds_token_limit(self._dialogue.tokenizer, message["content"], self._context_tokens):
                    raise too_long_error(self._context_tokens)
            return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, check_lengths_and_work)
        # Templates raise ValueError for conversations that they refuse.
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error


def too_long_error(context_tokens: int) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {context_tokens} tokens; the prompt leaves no room for an answer. "
        "Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
    )
