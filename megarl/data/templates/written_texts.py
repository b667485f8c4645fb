"""Checks that a chat template writes every text of a conversation. Templates ignore keys that they do not know."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megarl.data.chat import QUESTION, remove_marks, render
from megarl.data.messages import REASONING, REASONING_KEYS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def check_prompt_written(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], rendered: str
) -> None:
    """Raise ValueError for a text of a prompt, or a tool's name, missing in the rendered prompt.

    Templates may drop the reasoning of an answer before a later question, so `rendered` shows nothing about answers.
    Each is rendered alone, after one short question: rendering all earlier messages each time would be quadratic. Only
    if a text is missing there, the answer is rendered after all its earlier messages.
    """
    check_tools_written(tools, rendered)
    texts = _WrittenText(rendered)
    for message_index, message in enumerate(messages):
        if message["role"] != "assistant":
            _check_message_texts(message_index, message, texts)
        elif not _is_written_alone(tokenizer, message, tools):
            turn = render(tokenizer, messages[: message_index + 1], generation_prompt=False, tools=tools)
            check_answer_written(tokenizer, messages[: message_index + 1], tools, turn)


def _is_written_alone(tokenizer: Tokenizer, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the template writes all texts of an assistant's message that answers one short question."""
    names = {call["function"]["name"] for call in message.get("tool_calls", ())}
    called_tools = [tool for tool in tools if tool["function"]["name"] in names]
    try:
        turn = render(tokenizer, (QUESTION, message), generation_prompt=False, tools=called_tools)
        check_answer_written(tokenizer, (QUESTION, message), called_tools, turn)
    except ValueError:
        return False
    return True


def check_answer_written(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], rendered: str
) -> None:
    """Raise ValueError if the template leaves out a text of the last message, an answer of the assistant.

    `rendered` is the text of all messages. The answer's part of it begins after the earlier messages, with the
    generation prompt: this may already open the reasoning.
    """
    message_index = len(messages) - 1
    text_before_answer = (
        render(tokenizer, messages[:message_index], generation_prompt=False, tools=tools) if message_index else ""
    )
    _check_message_texts(
        message_index, messages[message_index], _WrittenText(rendered.removeprefix(text_before_answer))
    )


def check_messages_written(messages: Sequence[Mapping[str, Any]], rendered: str) -> None:
    """Raise ValueError for a text of a message missing in the rendered text, except those of the assistant."""
    texts = _WrittenText(rendered)
    for message_index, message in enumerate(messages):
        if message["role"] != "assistant":
            _check_message_texts(message_index, message, texts)


def _check_message_texts(message_index: int, message: Mapping[str, Any], rendered: _WrittenText) -> None:
    for key, text in _required_texts(message):
        if not rendered.contains(text):
            raise ValueError(_missing_text_message(f"the {key} of messages[{message_index}]", text))


def has_texts(rendered: str, message: Mapping[str, Any]) -> bool:
    written_text = _WrittenText(rendered)
    return all(written_text.contains(text) for _, text in _required_texts(message))


def check_tools_written(tools: Sequence[Mapping[str, Any]], rendered: str) -> None:
    """Raise ValueError for a tool's name missing in the rendered text."""
    written_text = _WrittenText(rendered)
    for tool in tools:
        if not written_text.contains(name := tool["function"]["name"]):
            raise ValueError(_missing_text_message("the tool", name))


def _missing_text_message(subject: str, text: str) -> str:
    return (
        f"the chat template does not write {subject}, {text!r:.60}; remove it, or set model.chat_template to a "
        "template that writes it"
    )


def _required_texts(message: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the texts of a message that a template must write, each after its label for errors.

    Arguments of calls are left out, because templates write them in various forms.
    """
    for text in _texts_of(message.get("content")):
        yield "content", text
    for text in _texts_of(message.get(REASONING)):
        yield f"reasoning ({', '.join(REASONING_KEYS)})", text
    for text in _texts_of(required_name(message)):
        yield "name", text
    for tool_call in message.get("tool_calls") or ():
        yield "tool call", tool_call["function"]["name"]


def required_name(message: Mapping[str, Any]) -> Any:
    """Return the name that a template must write. None: there is none, or the call that a tool answers has it."""
    return None if message["role"] == "tool" else message.get("name")


def _texts_of(value: Any) -> Iterable[str]:
    """Yield the texts of a message's value. An environment's message may have parts, a number or an object there.

    Templates write an object in various forms, so only its `text` is required.
    """
    for part in value if isinstance(value, list | tuple) else [value]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if text is not None:
            yield str(text)


class _WrittenText:
    """A rendered text in which the texts of messages are searched, usually in their order."""

    def __init__(self, rendered: str) -> None:
        self._rendered = rendered
        self._search_start = 0
        """End of the last match."""

    def contains(self, text: str) -> bool:
        """Return whether the rendered text has a message's text, as JSON or with other white space.

        The search begins at the end of the last match, then at the start.
        """
        text = text.strip()
        position = self._rendered.find(text, self._search_start)
        if position < 0:
            position = self._rendered.find(text)
        if position >= 0:
            self._search_start = position + len(text)
            return True
        forms = text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]
        return any(_without_space(form) in self._without_space for form in forms)

    @cached_property
    def _without_space(self) -> str:
        return _without_space(self._rendered)


def _without_space(text: str) -> str:
    return "".join(remove_marks(text).split())
