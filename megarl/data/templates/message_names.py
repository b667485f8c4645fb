"""Names of messages (`name`). Only some chat templates write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megarl.data.chat import QUESTION, render
from megarl.data.templates.written_texts import required_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_PROBE_NAME = "qzname"


def unwritten_names(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the names of messages whose role has no names in the chat template."""
    return [message["name"] for message in messages if _has_unwritten_name(tokenizer, message)]


def without_unwritten_names(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Return the messages, without `name` if the chat template writes no name for the message's role."""
    return tuple(
        {key: value for key, value in message.items() if key != "name"}
        if _has_unwritten_name(tokenizer, message)
        else message
        for message in messages
    )


def _has_unwritten_name(tokenizer: Tokenizer, message: Mapping[str, Any]) -> bool:
    return bool(required_name(message)) and not _writes_name(
        tokenizer, str(tokenizer.chat_template), str(message["role"])
    )


@lru_cache(maxsize=32)
def _writes_name(tokenizer: Tokenizer, template: str, role: str) -> bool:
    """Return whether the template writes the name of a message with this role.

    `template` is the tokenizer's template. As a parameter, it is part of the key of `lru_cache`: users may replace it.
    """
    named_message = {"role": role, "name": _PROBE_NAME, "content": "."}
    # Some templates refuse a conversation that begins with the assistant, or has a system message alone.
    conversation = (
        (named_message, QUESTION)
        if role == "system"
        else (QUESTION, named_message)
        if role == "assistant"
        else (named_message,)
    )
    try:
        return _PROBE_NAME in render(tokenizer, conversation, generation_prompt=False)
    except ValueError:
        # The conversation itself is rendered next, and its error is shown.
        return True
