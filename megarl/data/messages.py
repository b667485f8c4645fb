"""Messages of a conversation in one standard form. An unknown key is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, cycle, pairwise
from typing import Any

from megarl.data.sources.rows import EncodedBytes
from megarl.data.tools.records import with_standard_calls
from megarl.files.strict_json import MEDIUM, parse, shown

ROLES = ("system", "user", "assistant", "tool")
_CALLS = "function_call"
"""Role of an assistant's message in ShareGPT data that consists of tool calls, as JSON text."""
_ROLES_ELSEWHERE = {
    "human": "user", "gpt": "assistant", "developer": "system", _CALLS: "assistant", "observation": "tool",
}  # fmt: skip
"""Standard role names, by the names in ShareGPT data and in OpenAI's newer API."""
ROLE_NAMES = (*ROLES, *_ROLES_ELSEWHERE)
REASONING = "reasoning_content"
REASONING_KEYS = (REASONING, "reasoning", "thinking")
"""Names under which programs write the reasoning of an assistant's message."""
WEIGHT = "weight"
"""Key of a message that is not trained. In standard form its value is always 0."""
WEIGHT_KEYS = (WEIGHT, "loss", "loss_mask", "step_loss_mask", "trainable", "train", "training")
"""Names under which programs say whether an assistant's message is trained."""
_KEYS = {
    "system": frozenset({"role", "content", "name", *WEIGHT_KEYS}),
    "user": frozenset({"role", "content", "name", *WEIGHT_KEYS}),
    "assistant": frozenset({"role", "content", "name", "tool_calls", *REASONING_KEYS, *WEIGHT_KEYS}),
    "tool": frozenset({"role", "content", "name", "tool_call_id", *WEIGHT_KEYS}),
}
"""Accepted keys of messages, by role."""
_PLAIN_KEYS = {"role", "content"}
_CALL_KEYS = frozenset({"id", "type", "function", "index"})
_FUNCTION_KEYS = frozenset({"name", "arguments"})
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of text parts, in OpenAI's two APIs."""
_PREFIX = "prefix"
"""Key of a message that the answer continues (Mistral)."""
_REMEDIES = {
    "function_call": "give the call in tool_calls",
    **dict.fromkeys(
        ("mask", "masked", "train_on", "train_on_turn", "loss_scale", "loss_weight"),
        'give "weight": 0 if the message is not to be trained, and remove the key',
    ),
    **dict.fromkeys(
        ("train_detail", "training_detail", "reasoning_training_detail", _PREFIX),
        "a message is trained as a whole or not at all, so remove the record",
    ),
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios"), "megarl trains on text alone, so remove the record"
    ),
}
"""Remedies for known keys that are not read. For all others: remove the key."""


def standard_messages(messages: Sequence[Any], field: str) -> list[Mapping[str, Any]]:
    """Return the messages of a record's field in standard form. Raises ValueError naming the message and its key.

    A message in standard form has `role` and `content`, and may have `name`, `tool_calls`, `tool_call_id`,
    `reasoning_content`, and `weight` = 0. Keys with an empty value are removed: data sets in columns give every message
    the same keys.
    """
    standard = [
        _standardize_message(message, f"{field}[{message_index}]", message_index == 0)
        for message_index, message in enumerate(messages)
    ]
    _refuse_unknown_call_ids(standard, field)
    _refuse_split_turns(messages, standard, field)
    return standard


def _refuse_split_turns(messages: Sequence[Any], standard: Sequence[Mapping[str, Any]], field: str) -> None:
    """Raise ValueError if a message of role function_call is next to another one of the assistant.

    As two turns, the first would learn to end before its call or the call's result.
    """
    role_names = [message.get("role") or message.get("from") for message in messages]
    if _CALLS not in role_names:
        return
    for message_index, pair in enumerate(pairwise(role_names), start=1):
        if _CALLS in pair and standard[message_index - 1]["role"] == standard[message_index]["role"] == "assistant":
            raise ValueError(
                f"{field}[{message_index}]: a message of role {pair[1]} follows a message of role {pair[0]}; merge "
                "them into one message of role assistant with all calls in tool_calls, or put the calls' result (role "
                "observation) between them"
            )


def _refuse_unknown_call_ids(messages: Sequence[Mapping[str, Any]], field: str) -> None:
    """Raise ValueError if a tool's result has the `tool_call_id` of no earlier call.

    Nothing is checked if calls have no ids, or are in another field.
    """
    # Keyed by `repr`, because an id may be an unhashable value. A dict keeps the order of the calls.
    call_ids: dict[str, Any] = {}
    for message_index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            if not call.get("id"):
                return
            call_ids[repr(call["id"])] = call["id"]
        answered_id = message.get("tool_call_id")
        if answered_id is not None and call_ids and repr(answered_id) not in call_ids:
            raise ValueError(
                f"{field}[{message_index}] has tool_call_id {shown(answered_id)}, which is the id of no call before it "
                f"({', '.join(map(shown, list(call_ids.values())[-5:]))}); give the id of its call, or leave out all "
                "ids"
            )


def history_messages(value: Any, field: str) -> list[Mapping[str, Any]]:
    """Return earlier turns in standard form, from messages or from pairs of a question and an answer.

    Both may be JSON text. Raises ValueError for other values, and the errors of `standard_messages`.
    """
    turns = value
    if isinstance(value, str):
        with suppress(ValueError):  # The error below shows the text.
            turns = parse(value.encode(), MEDIUM)
    if isinstance(turns, list) and all(map(_is_pair, turns)):
        roles = cycle(("user", "assistant"))
        turns = [{"role": role, "content": text} for role, text in zip(roles, chain(*turns), strict=False)]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError(f"'{field}' is {shown(value)}; give messages, or pairs of a question and an answer")
    return standard_messages(turns, field)


def _is_pair(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)


def without_weights(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    return tuple(
        {name: value for name, value in message.items() if name != WEIGHT} if WEIGHT in message else message
        for message in messages
    )


def have_same_texts(messages: Sequence[Mapping[str, Any]], other_messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether messages are equal, apart from white space around their contents."""
    return list(map(_strip_content, messages)) == list(map(_strip_content, other_messages))


def _strip_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": content.strip()} if isinstance(content, str) else message


def is_empty(value: Any) -> bool:
    """Return whether a value is null, or an empty text, list or object. 0 and false are not empty."""
    return value is None or (isinstance(value, str | Sequence | Mapping) and not value)


def is_blank(value: Any) -> bool:
    """Return whether a value is empty or a text of white space."""
    return is_empty(value) or (isinstance(value, str) and not value.strip())


def says_nothing(value: Any) -> bool:
    """Return whether a value is blank, or a list or object of only blank values, as in exports in columns."""
    if isinstance(value, Mapping):
        return all(map(says_nothing, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(says_nothing, value))
    return is_blank(value)


def _is_plain_message(value: Any, is_first: bool) -> bool:
    """Return whether a message has only a role and a text. Nearly all do, and need no further check."""
    if type(value) is not dict or value.keys() != _PLAIN_KEYS or type(value["content"]) is not str:
        return False
    role = value["role"]
    return role == "assistant" or (role == "user" and bool(value["content"].strip())) or (role == "system" and is_first)


def _standardize_message(value: Any, field_path: str, is_first: bool) -> Mapping[str, Any]:
    """Return the message in the form of the OpenAI API."""
    if _is_plain_message(value, is_first):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{field_path} is {shown(value)}; give an object with 'role' and 'content'")
    # ShareGPT writes `from` and `value` for role and content.
    message = {
        name: item for name, item in value.items() if name in ("content", "value") or not _counts_as_absent(name, item)
    }
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
        if "value" in message:
            if not is_empty(message.get("content")) and message["content"] != message["value"]:
                raise ValueError(
                    f"{field_path} has content {shown(message['content'])} and another value "
                    f"{shown(message['value'])}; remove one of them"
                )
            message["content"] = message.pop("value")
    if is_empty(message.get("value")):
        message.pop("value", None)
    # Other names of roles, and messages that are only tool calls.
    role = message.get("role")
    if role == _CALLS:
        _move_calls_from_content(message, field_path)
    if isinstance(role, str):
        role = message["role"] = _ROLES_ELSEWHERE.get(role, role)
    if role not in ROLES:
        raise ValueError(f"{field_path} has role {shown(role)}; use one of {', '.join(ROLES)}")
    if role == "system" and not is_first:
        raise ValueError(f"{field_path} is a system message; only the first message may be one")
    # Calls, contents, reasoning and weight in one form each. An unknown key is an error, not dropped.
    try:
        message = {**with_standard_calls(message)}
    except ValueError as error:
        raise ValueError(f"{field_path} {error}") from error
    _refuse_unread_keys(message, _KEYS[role], field_path, f"the role {role}")
    if isinstance(message.get("content"), list) and message["content"]:
        message["content"] = _join_text_parts(message["content"], field_path)
    _check_texts(message, field_path)
    _refuse_unread_call_keys(message, field_path)
    _unify_reasoning(message, field_path)
    _unify_weight(message, field_path)
    return message


def _move_calls_from_content(message: dict[str, Any], field_path: str) -> None:
    """Parse the calls in a message's content (JSON). Move them to `tool_calls`, and thoughts before them to
    `reasoning_content`.
    """
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else json.dumps(content)
    if text.startswith("<think>") and "</think>" in text:
        thoughts, _, text = text.removeprefix("<think>").partition("</think>")
        if message.setdefault(REASONING, thoughts) != thoughts:
            raise ValueError(
                f"{field_path} has different thoughts in {REASONING} and before the call; keep one of them"
            )
    try:
        calls = parse(text.encode(), MEDIUM)
    except ValueError as error:
        raise ValueError(f"{field_path} of role {_CALLS} has {shown(content)}: {error}; give a call as JSON") from error
    if calls in ([], {}, None) or "tool_calls" in message:
        raise ValueError(
            f"{field_path} of role {_CALLS} has {shown(content)}; give one call or a list of calls as JSON"
        )
    message |= {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _counts_as_absent(name: str, value: Any) -> bool:
    """Return whether a message's key counts as absent: its value is empty.

    A list or object of blank values is empty too, except `tool_calls`. `prefix` is false in ordinary messages.
    """
    if name == _PREFIX and value is False:
        return True
    return is_empty(value) or (name != "tool_calls" and not isinstance(value, str) and says_nothing(value))


def _refuse_unread_keys(
    values: Mapping[str, Any], read_keys: frozenset[str], field_path: str, object_text: str
) -> None:
    """Raise ValueError for a key that is not read, unless its value is empty. `object_text` names the object."""
    for name in values:
        if name not in read_keys and not _counts_as_absent(name, values[name]):
            remedy = _REMEDIES.get(name, "remove the key")
            keys = ", ".join(sorted(read_keys))
            raise ValueError(
                f"{field_path} has the key {shown(name)} = {shown(values[name])}, which is not read; {remedy}. Keys of "
                f"{object_text}: {keys}"
            )


def _join_text_parts(parts: Sequence[Any], field_path: str) -> str:
    """Return the text of content parts. Raises ValueError for a part that is not text."""
    texts: list[str] = []
    for part_index, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise ValueError(f"{field_path} has content {shown(parts)}; give a string")
        part_type = part.get("type") or "text"
        text = part.get("text")
        if part_type not in _TEXT_PARTS or not isinstance(text, str):
            raise ValueError(
                f"{field_path} has a content part of type {shown(part_type)}: {shown(part)}; megarl trains on text "
                "alone, so remove the part or the record"
            )
        _refuse_unread_keys(part, frozenset({"type", "text"}), f"{field_path}.content[{part_index}]", "a text part")
        texts.append(text)
    return "".join(texts)


def _check_texts(message: Mapping[str, Any], field_path: str) -> None:
    """Raise ValueError for a content or name that is not a text, and for a user's message without text."""
    name, content = message.get("name"), message.get("content")
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{field_path} has name {shown(name)}; give a string")
    if content is None and "tool_calls" in message:
        return
    if isinstance(content, EncodedBytes):
        raise ValueError(f"{field_path} has content of bytes that are not UTF-8 text; save it as text")
    if not isinstance(content, str):
        with_calls = ", or null with tool_calls" if "tool_calls" in message else ""
        raise ValueError(f"{field_path} has content {shown(content)}; give a string{with_calls}")
    if message["role"] == "user" and not content.strip():
        raise ValueError(f"{field_path} is a user's message without text; give the prompt, or remove the line")


def _refuse_unread_call_keys(message: Mapping[str, Any], field_path: str) -> None:
    for call_index, call in enumerate(message.get("tool_calls", ())):
        call_path = f"{field_path}.tool_calls[{call_index}]"
        _refuse_unread_keys(call, _CALL_KEYS, call_path, "a tool call")
        if (call_type := call.get("type") or "function") != "function":
            raise ValueError(f"{call_path} has type {shown(call_type)}; only calls of type function are read")
        _refuse_unread_keys(call["function"], _FUNCTION_KEYS, f"{call_path}.function", "a call's function")


def _unify_reasoning(message: dict[str, Any], field_path: str) -> None:
    """Write a message's reasoning under the key `reasoning_content`. Raises ValueError for two different texts."""
    values = {name: message.pop(name) for name in REASONING_KEYS if name in message}
    for name, text in values.items():
        if not isinstance(text, str):
            raise ValueError(f"{field_path} has {name} {shown(text)}; give a string")
        if text != next(iter(values.values())):
            raise ValueError(f"{field_path} has different texts in {' and '.join(values)}; keep one of them")
    if values:
        message[REASONING] = next(iter(values.values()))


def _unify_weight(message: dict[str, Any], field_path: str) -> None:
    """Unify the keys that say whether a message is trained: `weight` is 0 if not, and absent if it is.

    Raises ValueError for weights other than 0 and 1, for contradictory keys, and for a trained message of another role
    than assistant.
    """
    values = {name: message.pop(name) for name in WEIGHT_KEYS if name in message}
    for name, value in values.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(
                f"{field_path} has {name} {shown(value)}; give 1 or true for a message to train, 0 or false for "
                "another one"
            )
        if value != next(iter(values.values())):
            raise ValueError(f"{field_path}: {' and '.join(values)} disagree; keep one of them")
        if value and message["role"] != "assistant":
            raise ValueError(
                f"{field_path} has {name} {shown(value)}; only the assistant's messages are trained, so remove the key"
            )
    if values and message["role"] == "assistant" and not next(iter(values.values())):
        message[WEIGHT] = 0
