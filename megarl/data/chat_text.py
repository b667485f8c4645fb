"""Chats that were saved as text: a list of messages in JSON, as in CSV files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from megarl.data.messages import ROLE_NAMES
from megarl.files.strict_json import MEDIUM, parse

# A JSON text inside a JSON text begins with a quote, and its own quotes have backslashes. numpy writes `array(`.
# Possessive quantifiers (`*+`) keep the search linear for texts with much white space.
_BEGINNING = re.compile(r"""\s*+"?\s*+(?:array\()?[\[(\s]*+\{\s*+\\?["'](?P<key>[A-Za-z_]++)\\?["']\s*:""")
_ROLE = re.compile(r"""["'](?:role|from)\\?["']\s*:""")
_KNOWN_ROLE = re.compile(rf"""{_ROLE.pattern}\s*+\\?["'](?:{"|".join(ROLE_NAMES)})\\?["']""")
_CONTENT_KEYS = ("content", "value", "tool_calls")
_CONTENT = re.compile(rf"""["'](?:{"|".join(_CONTENT_KEYS)})\\?["']\s*:""")
_CLOSED_LIST = re.compile(r"\}\s*+,?\s*+\]")


def chat_in_text(text: str, *, is_answer: bool = False) -> list[Any] | None:
    """Return the messages of a chat that was saved as JSON text. None: the text is not a chat.

    A single message counts as a chat. Raises ValueError for a chat in Python's notation, for broken JSON, and for a
    chat inside another object or list. With `is_answer`, a chat inside another object is plain text: models are asked
    to write such objects.
    """
    beginning = _BEGINNING.match(text)
    if beginning is None or not _ROLE.search(text):
        return None
    try:
        value = parse(text.encode(), MEDIUM)
        if isinstance(value, str):
            value = parse(value.encode(), MEDIUM)
    except ValueError as error:
        # Broken JSON: an error if it is certainly a chat, otherwise plain text.
        if not _KNOWN_ROLE.search(text) or not _CONTENT.search(text) or _quotes_chat(text):
            return None
        if is_answer and beginning["key"] not in ("role", "from", *_CONTENT_KEYS):
            return None
        if re.match(r"[^\"]*'", text):
            raise ValueError("is a chat in Python's notation instead of JSON; write it with json.dumps") from None
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"begins like a chat in JSON, but is not valid JSON ({reason}); write it again") from None
    # Valid JSON: a chat, a record or list around chats (an error), or plain text.
    messages = [value] if isinstance(value, Mapping) else value
    if _is_chat(messages) or _is_list_of_plain_messages(value):
        return messages
    if is_answer:
        return None
    if isinstance(value, Mapping) and any(map(_is_chat, value.values())):
        raise ValueError("is a whole record in JSON; give only its messages here, and its other values in other fields")
    if isinstance(value, list) and any(map(_is_chat, value)):
        raise ValueError("is a list of chats in JSON; give each chat a record of its own")
    return None


def _quotes_chat(text: str) -> bool:
    """Return whether a text is a chat in JSON followed by other words, like a question about the chat."""
    # A list without its closing bracket is a broken chat: its last words are the end of a message.
    is_cut_off = text.lstrip().startswith("[") and not _CLOSED_LIST.search(text)
    return not is_cut_off and not text.rstrip().endswith(("]", "}", ")", '"'))


def _is_chat(value: Any) -> bool:
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return False
    has_content = any(not message.keys().isdisjoint(_CONTENT_KEYS) for message in value)
    return has_content and all((message.get("role") or message.get("from")) in ROLE_NAMES for message in value)


def _is_list_of_plain_messages(value: Any) -> bool:
    """Return whether a value is a list of objects with only role and content.

    Any role counts: a later check names a misspelled role.
    """
    return isinstance(value, list) and all(
        isinstance(message, Mapping) and message.keys() in ({"role", "content"}, {"from", "value"}) for message in value
    )
