"""Between messages and tokens, off the event loop: in one thread, with a tokenizer that nothing else uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from megarl.data.chat import encode, exceeds
from megarl.data.dialogue import Dialogue
from megarl.data.tool_calls import ParsedTurn
from megarl.data.tool_schemas import ToolSchema, check_tools
from megarl.environments import Message
from megarl.rollout.stitch import ModelCall
from megarl.serving.conversation import Conversation
from megarl.serving.refusal import RequestError
from megarl.types import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase as Tokenizer

Result = TypeVar("Result")


class Codec:
    """Renders, encodes and decodes for all sessions of an endpoint.

    The tokenizer must be its own: a fast tokenizer is not re-entrant. Calls of tools are read in the format that the
    chat template shows, or `tool_parser` (`rollout.tool_parser`).
    """

    def __init__(self, tokenizer: Tokenizer, context_tokens: int, tool_parser: str | None = None) -> None:
        self._dialogue = Dialogue(tokenizer, tool_parser)
        self._context_tokens = context_tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="endpoint_codec")

    async def opening(self, conversation: Conversation) -> NDArray[np.int32]:
        """Token ids [prompt] of a conversation. Raises RequestError: refused by the template, or too long."""
        messages, tools = conversation.messages, conversation.tools
        return await self._in_thread(lambda: self._dialogue.opening(messages, tools), messages)

    async def continued(
        self, token_ids: NDArray[np.int32], messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> NDArray[np.int32]:
        """Token ids [tokens], which end with an assistant's turn, and those of messages after it, as `opening`."""
        added = await self._in_thread(lambda: self._dialogue.observation(token_ids, messages, tools), messages)
        return np.concatenate([token_ids, added])

    async def encoded(self, text: str) -> NDArray[np.int32]:
        """Token ids [tokens] of a text that is a prompt by itself; names of special tokens in it are these tokens."""
        messages = ({"role": "user", "content": text},)
        return await self._in_thread(lambda: np.array(encode(self._dialogue.tokenizer, text), np.int32), messages)

    async def parsed(self, call: ModelCall, tools: Sequence[ToolSchema], turn: int) -> tuple[ParsedTurn, str]:
        """The parts of a sampled turn, without tools its text alone; and its whole text without special tokens."""

        def parts() -> tuple[ParsedTurn, str]:
            token_ids = call.completion.token_ids
            whole = self._dialogue.text(token_ids)
            if not tools:
                return ParsedTurn(whole, None, ()), whole
            return self._dialogue.parsed(call.prompt_token_ids, token_ids, tools, turn=turn), whole

        return await self._in_thread(parts)

    async def tokens(self, token_ids: NDArray[np.int64]) -> list[str]:
        """The text of each token by itself."""
        each = [token_ids[place : place + 1] for place in range(len(token_ids))]
        return await self._in_thread(lambda: [self._dialogue.text_with_special_tokens(token) for token in each])

    def check_tools(self, tools: Sequence[ToolSchema]) -> None:
        """Raise RequestError for tools that are no JSON schemas, or whose calls could not be read."""
        if not tools:
            return
        try:
            check_tools(tools)
            _ = self._dialogue.call_format
        except (ValueError, ConfigError) as error:
            raise RequestError(f"tools: {error}", param="tools") from error

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], Result], messages: Sequence[Message] = ()) -> Result:
        def checked() -> Result:
            for message in messages:
                # Told from little of the text, so that a huge one does not keep the thread from others.
                if exceeds(self._dialogue.tokenizer, message["content"], self._context_tokens):
                    raise too_long(self._context_tokens)
            return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, checked)
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error


def too_long(context_tokens: int) -> RequestError:
    """The refusal of a prompt that does not fit."""
    return RequestError(
        f"This model's maximum context length is {context_tokens} tokens; the prompt leaves no room for an answer. "
        "Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
    )
