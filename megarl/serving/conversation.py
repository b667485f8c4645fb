"""Conversations in canonical form, to match the history sent by a client with the recorded tokens.

Clients change a history when they send it back. They drop reasoning, add or omit empty lists of calls, serialise
arguments differently, change ids of calls and trim blanks around an answer. The canonical form ignores these changes,
but not a changed word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.environments import Message
from megarl.files.strict_json import is_deeper, make_object, refuse_surrogates
from megarl.serving.refusal import RequestError

MAX_DEPTH = 64
"""Maximum depth of nested objects and lists in a request.

Chat templates and json.dumps recurse into them. Python raises RecursionError at about 1,000 stack frames.
"""
_UNREAD_TEXTS = ("function_call", "refusal", "audio")
"""Keys of OpenAI's messages that hold a part of the history, and that the endpoint never writes itself."""
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as chat templates expect it: messages and available tools.

    `keys` are the messages in canonical form, without reasoning. `reasoning` has each message's reasoning; empty if the
    client sends none.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    keys: tuple[str, ...]
    reasoning: tuple[str, ...]

    @classmethod
    def read(cls, messages: Any, tools: Any = None) -> Conversation:
        """Read the conversation of a request. Raises RequestError unless `messages` is a list of messages with text."""
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages: must be a list of at least one message", param="messages")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
            raise RequestError("tools: must be a list of JSON schemas", param="tools")
        # An empty list of tools renders the same prompt as no tools.
        empty_conversation = cls((), tuple(tools or ()), (), ())
        return empty_conversation.with_messages(_read_message(message, index) for index, message in enumerate(messages))

    def with_messages(self, messages: Iterator[Message] | Sequence[Message]) -> Conversation:
        """Return this conversation with further messages. These have the form expected by chat templates."""
        added_messages = tuple(messages)
        all_messages = (*self.messages, *added_messages)
        keys = [
            _make_key(message, positions)
            for message, positions in zip(all_messages, _call_positions(all_messages), strict=True)
        ]
        reasoning = tuple(_reasoning(message) for message in added_messages)
        return Conversation(all_messages, self.tools, tuple(keys), (*self.reasoning, *reasoning))

    def hash_beginnings(self) -> list[bytes]:
        """Return hashes of the conversation's beginnings, [messages + 1]: the tools alone, then up to each message."""
        digest = hashlib.sha256(_canonical_json(self.tools).encode()).digest()
        digests = [digest]
        for key in self.keys:
            # Chained: n messages cost n hashes, and each digest stands for all messages up to it.
            digest = hashlib.sha256(digest + key.encode()).digest()
            digests.append(digest)
        return digests

    def count_common_messages(self, conversation: Conversation) -> int:
        """Return the number of equal messages at the beginning of both conversations; 0 if their tools differ."""
        if self.tools != conversation.tools:
            return 0
        pairs = enumerate(zip(self.keys, conversation.keys, strict=False))
        return next(
            (index for index, (key, other_key) in pairs if key != other_key),
            min(len(self.keys), len(conversation.keys)),
        )

    def has_reasoning_of(self, beginning: Conversation) -> bool:
        """Return whether this conversation repeats the reasoning in `beginning`, its first messages."""
        pairs = zip(self.reasoning, beginning.reasoning, strict=False)
        return all(not text or text == text_of_beginning for text, text_of_beginning in pairs)


def answer_message(text: str, reasoning: str | None, calls: Sequence[tuple[str, str, str]]) -> Message:
    """Return an assistant's message in the form expected by chat templates. `calls` are (id, name, arguments as
    sent).
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": _parse_arguments(arguments)}}
            for call_id, name, arguments in calls
        ]
    return message


def _read_message(message: Any, index: int) -> Message:
    """Convert a request's message to the form expected by chat templates. Raises RequestError if it is invalid."""
    field_path = f"messages.{index}"
    if not isinstance(message, Mapping):
        raise RequestError(f"{field_path}: must be an object with role and content", param=field_path)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{field_path}.role: is {role!r:.40}; give one of {', '.join(ROLES)}", param=f"{field_path}.role"
        )
    fields: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _read_text(message.get("content"), f"{field_path}.content"),
    }
    for name in _UNREAD_TEXTS:
        if message.get(name):
            raise RequestError(
                f"{field_path}.{name} = {message[name]!r:.80}: is not read; give calls in tool_calls and texts in "
                "content, or remove it",
                param=f"{field_path}.{name}",
            )
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            fields[name] = message[name]
    if role == "assistant":
        # vLLM and clients use both names for reasoning.
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            fields["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            fields["tool_calls"] = _read_calls(calls, f"{field_path}.tool_calls")
    return fields


def _read_text(content: Any, field_path: str) -> str:
    """Return the text of a content: a string or a list of text parts. Raises RequestError for other contents."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(map(_is_text_part, content)):
        return "".join(part["text"] for part in content)
    raise RequestError(
        f"{field_path}: must be text, or a list of parts of type text; this model reads no other types",
        param=field_path,
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _read_calls(calls: Any, field_path: str) -> list[dict[str, Any]]:
    """Convert tool calls to the form expected by chat templates. Raises RequestError if they are invalid."""
    tool_calls = []
    # Read anything but a list as one call, so that it gets a call's checks.
    call_entries: list[Any] = calls if isinstance(calls, list) else [calls]
    for index, call in enumerate(call_entries):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{field_path}.{index}: must be an object with function.name", param=field_path)
        arguments = _parse_arguments(function.get("arguments", {}))
        tool_calls.append(
            {
                "id": str(call.get("id", "")),
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return tool_calls


def _parse_arguments(arguments: Any) -> Any:
    """Parse the JSON object in `arguments`. Other text, repeated keys and too deep nesting are returned unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed_arguments = json.loads(arguments, object_pairs_hook=make_object)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(parsed_arguments, dict) or is_deeper(parsed_arguments, MAX_DEPTH):
        return arguments
    try:
        refuse_surrogates(parsed_arguments)
    except ValueError:
        return arguments
    return parsed_arguments


def _call_positions(messages: Sequence[Message]) -> Iterator[Mapping[str, int]]:
    """Yield for each message the positions, by call id, of the tool calls in the last assistant message before it."""
    positions: dict[str, int] = {}
    for message in messages:
        yield positions
        if message["role"] == "assistant":
            positions = {call["id"]: position for position, call in enumerate(message.get("tool_calls", ()))}


def _make_key(message: Message, call_positions: Mapping[str, int]) -> str:
    """Return a message in canonical form. Tool calls are identified by position, because clients change ids."""
    content = message["content"]
    if message["role"] == "assistant":
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [[function["name"], _convert_to_floats(function["arguments"])] for function in functions]
        # Strip blanks from assistant messages only: other roles' blanks reach the prompt unchanged.
        return _canonical_json(["assistant", content.strip(), calls])
    answered_id = message.get("tool_call_id", "")
    return _canonical_json([message["role"], content, call_positions.get(answered_id, answered_id)])


def _convert_to_floats(value: Any) -> Any:
    """Convert all numbers of parsed JSON to floats: JavaScript clients send 120.0 back as 120."""
    if isinstance(value, Mapping):
        return {name: _convert_to_floats(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_convert_to_floats(entry) for entry in value]
    # An integer too large for a float stays an integer.
    is_number = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000
    return float(value) if is_number else value


def _reasoning(message: Message) -> str:
    return str(message.get("reasoning_content", "")).strip()


def _canonical_json(value: Any) -> str:
    # Sorted keys and fixed separators: clients serialise arguments again in their own order.
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
