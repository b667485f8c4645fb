"""The form of a tool call's arguments in a chat template: an object, or JSON text.

Most templates write an object as JSON; a JSON text would be quoted once more. Others insert a text unchanged, and fail
on an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_PROBE_VALUE = "value"
_PROBE_ARGUMENTS = {"x": _PROBE_VALUE}
_PROBE_AS_PYTHON_TEXT = repr(_PROBE_ARGUMENTS)
"""The probe as Python text. A template that expects JSON text writes an object like this."""


def fit_call_arguments(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages, with the arguments of tool calls as JSON text if the template takes only text."""
    if not any(message.get("tool_calls") for message in messages):
        return list(messages)
    if not _requires_text_arguments(tokenizer, str(tokenizer.chat_template)):
        return list(messages)
    return [_with_text_arguments(message) if message.get("tool_calls") else message for message in messages]


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if isinstance(function.get("arguments"), Mapping):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


@lru_cache(maxsize=8)
def _requires_text_arguments(tokenizer: Tokenizer, template: str) -> bool:
    """Return whether the template renders a tool call correctly only with arguments as JSON text.

    `template` is the tokenizer's template. As a parameter, it is part of the key of `lru_cache`: users may replace it.
    """
    call_from_object = _render_call(tokenizer, template, _PROBE_ARGUMENTS)
    if (
        call_from_object is not None
        and _PROBE_VALUE in call_from_object
        and _PROBE_AS_PYTHON_TEXT not in call_from_object
    ):
        return False
    call_from_text = _render_call(tokenizer, template, json.dumps(_PROBE_ARGUMENTS))
    return call_from_text is not None and json.dumps(_PROBE_ARGUMENTS) in call_from_text


def _render_call(tokenizer: Tokenizer, template: str, arguments: Any) -> str | None:
    """Return a turn with one tool call, rendered. None: the template raises an error."""
    # Nine letters and digits: Mistral's chat templates refuse any other id.
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        # A question first: some templates refuse a conversation that begins with the assistant.
        return str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "."}, turn], chat_template=template, tokenize=False
            )
        )
    except Exception:  # a template is a program written by the model's author: it may raise anything
        return None
