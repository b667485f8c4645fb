"""Texts of samples for a page: shortened, and with hidden characters made visible."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_TEXT = 4_000
"""Maximum characters shown of a completion."""
_MESSAGE = 1_500
"""Maximum characters shown of a message."""
_TOKENS = 600
"""Maximum tokens shown of a sample written token by token."""
_TURNS_OF_END = 20
"""Number of turns shown at each end of an attempt, and of messages at each end of a prompt."""
_MESSAGES_OF_END = 3
"""Number of messages shown at each end of the replies to one turn."""
_TEXT_OF_TURNS = 60_000
"""Maximum characters shown of all turns of an attempt. With many turns, each is cut shorter."""
_TEXT_OF_PROMPT = 30_000
"""Maximum characters shown of all messages of a prompt."""
_LEAST_TEXT = 200
"""Minimum characters shown of a turn."""
_HIDDEN_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
"""Invisible characters that can change a text's display: control characters except tab and line feed, bidirectional
controls, zero-width characters, lone surrogates.
"""


def make_visible(text: str) -> str:
    """Return the text with control characters as pictures, and other hidden characters as `<U+202E>`."""
    # Windows line ends are shown as line ends, not as pictures of a carriage return.
    return _HIDDEN_CHARACTERS.sub(_visible_replacement, text.replace("\r\n", "\n"))


def shortened_text(text: str, max_characters: int) -> str:
    """Return a text cut to about `max_characters` characters, with hidden characters made visible.

    Beginning and end remain, with the number of omitted characters between them.
    """
    if len(text) <= max_characters:
        return make_visible(text)
    head = max_characters * 2 // 3
    tail = max_characters - head
    num_omitted = len(text) - max_characters
    # Convert only the shown parts, because a text may have megabytes.
    return f"{make_visible(text[:head])}\n[... {num_omitted} characters left out ...]\n{make_visible(text[-tail:])}"


def compact(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample's record for the page: shortened and visible. Missing fields are left out."""
    names = ("set", "source", "reward_failure", "finish_reason")
    texts = {name: shortened_text(str(record[name]), _MESSAGE) for name in names if record.get(name) is not None}
    max_prompt_characters = _TEXT_OF_PROMPT // max(1, min(len(as_list(record.get("prompt"))), 2 * _TURNS_OF_END))
    prompt = _format_messages(
        record.get("prompt"), ends=_TURNS_OF_END, max_characters=min(_MESSAGE, max_prompt_characters)
    )
    numbers = {
        name: short_number(record[name])
        for name in ("step", "line", "reward", "tokens")
        if is_finite_number(record.get(name))
    }
    flags = {name: record[name] for name in ("answer_correct", "format_valid") if isinstance(record.get(name), bool)}
    content: dict[str, Any] = {**texts, **numbers, **flags, "prompt": prompt}
    if record.get("answer") not in (None, ""):
        content["answer"] = shortened_text(as_text(record["answer"]), _MESSAGE)
    if turns := _format_turns(record):
        content["turns"] = turns
    else:
        content["completion"] = shortened_text(as_text(record.get("completion", "")), _TEXT)
    return content


def token_columns(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return a sample's tokens as arrays of equal length: visible texts, and rounded numbers."""
    texts = [make_visible(str(text)) for text in as_list(columns.get("text"))][:_TOKENS]
    arrays: dict[str, list[Any]] = {"text": texts}
    for name, values in columns.items():
        numbers = as_list(values)[: len(texts)]
        # Drop a column of another length, because it cannot be matched with the tokens.
        if name != "text" and len(numbers) == len(texts):
            arrays[str(name)] = [short_number(value) if is_finite_number(value) else None for value in numbers]
    return arrays


def _format_turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an attempt's turns with their numbers: all, or the first and last turns."""
    numbered_turns = [
        (number, turn) for number, turn in enumerate(as_list(record.get("turns")), 1) if isinstance(turn, Mapping)
    ]
    if len(numbered_turns) > 2 * _TURNS_OF_END:
        numbered_turns = [*numbered_turns[:_TURNS_OF_END], *numbered_turns[-_TURNS_OF_END:]]
    num_texts = sum(1 + min(len(as_list(turn.get("observation"))), 2 * _MESSAGES_OF_END) for _, turn in numbered_turns)
    max_characters = max(_LEAST_TEXT, _TEXT_OF_TURNS // max(1, num_texts))
    return [
        {
            "number": number,
            "completion": shortened_text(as_text(turn.get("completion", "")), min(_TEXT, max_characters)),
            **({"reward": short_number(turn["reward"])} if is_finite_number(turn.get("reward")) else {}),
            "observation": _format_messages(
                turn.get("observation"), ends=_MESSAGES_OF_END, max_characters=min(_MESSAGE, max_characters)
            ),
        }
        for number, turn in numbered_turns
    ]


def _format_messages(value: Any, *, ends: int, max_characters: int) -> list[dict[str, str]]:
    """Return messages as roles and texts. Tool calls and other fields become JSON.

    Of more than 2 * `ends` messages, a note with the number of omitted ones replaces the middle.
    """
    messages = as_list(value) if not isinstance(value, Mapping | str) else [value]
    num_omitted = len(messages) - 2 * ends
    if num_omitted <= 0:
        return [_format_message(message, max_characters) for message in messages]
    omission = {"role": "", "text": f"[... {num_omitted} messages left out ...]"}
    first_messages, last_messages = messages[:ends], messages[-ends:]
    return [
        *(_format_message(message, max_characters) for message in first_messages),
        omission,
        *(_format_message(message, max_characters) for message in last_messages),
    ]


def _format_message(message: Any, max_characters: int) -> dict[str, str]:
    if not isinstance(message, Mapping):
        return {"role": "", "text": shortened_text(as_text(message), max_characters)}
    other_fields = {name: item for name, item in message.items() if name not in ("role", "content") and item}
    text = as_text(message.get("content") or "") + (f"\n{as_text(other_fields)}" if other_fields else "")
    return {"role": shortened_text(str(message.get("role", "")), 40), "text": shortened_text(text, max_characters)}


def is_finite_number(value: Any) -> bool:
    """Return whether a value is a finite number small enough to be rounded and summed. A bool is not a number."""
    # 1e300 and not the largest float, so that rounding and sums cannot overflow.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def short_number(value: Any) -> Any:
    """Return a number with four significant digits, as an integer if it is one."""
    number = float(f"{float(value):.4g}") if not isinstance(value, int) else value
    return int(number) if float(number).is_integer() else number


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _visible_replacement(match: re.Match[str]) -> str:
    code = ord(match[0])
    # Unicode has a picture for each control character, from U+2400 on.
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"
