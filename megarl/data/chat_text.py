"""Chats that were saved as text: a list of messages in JSON, as CSV files and table programs store it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from megarl.files.strict_json import MEDIUM, parse

# A JSON text inside a JSON text begins with a quote, and its own quotes have backslashes. numpy writes `array(`.
# Possessive quantifiers (`*+`) keep the search linear for texts with much white space.
_BEGINNING = re.compile(r"""\s*+"?\s*+(?:array\()?[\[(\s]*+\{\s*+\\?["'][A-Za-z_]++\\?["']\s*:""")
_ROLE = re.compile(r"""["'](?:role|from)\\?["']\s*:""")
_CLOSED_LIST = re.compile(r"\}\s*+,?\s*+\]")


def chat_in_text(text: str) -> list[Any] | None:
    """Return the messages of a chat that was saved as text in JSON, or None if the text is not a chat.

    A single message counts as a chat too. Raises ValueError for a chat in Python's own notation, for broken JSON, and
    for a chat inside another object or list.
    """
    if not _BEGINNING.match(text) or not _ROLE.search(text):
        return None
    try:
        value = parse(text.encode(), MEDIUM)
        if isinstance(value, str):
            value = parse(value.encode(), MEDIUM)
    except ValueError as error:
        if _quotes_chat(text):
            return None
        if re.match(r"[^\"]*'", text):
            raise ValueError("is a chat in Python's notation instead of JSON; write it with json.dumps") from None
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"begins like a chat in JSON, but is not valid JSON ({reason}); write it again") from None
    messages = [value] if isinstance(value, Mapping) else value
    if _is_chat(messages):
        return messages
    if isinstance(value, Mapping) and any(map(_is_chat, value.values())):
        raise ValueError("is a whole record in JSON; give its messages alone, and its other fields as fields")
    if isinstance(value, list) and any(map(_is_chat, value)):
        raise ValueError("is a list of chats in JSON; give each chat a record of its own")
    return None


def _quotes_chat(text: str) -> bool:
    """Return whether a text quotes a chat and is not itself a chat.

    Such a text begins with a chat in JSON, and other words follow. An example is a question about that chat.
    """
    is_cut = text.lstrip().startswith("[") and not _CLOSED_LIST.search(text)
    return not is_cut and not text.rstrip().endswith(("]", "}", ")", '"'))


def _is_chat(value: Any) -> bool:
    if not isinstance(value, list) or not value or not isinstance(value[0], Mapping):
        return False
    names = value[0].keys()
    return not names.isdisjoint(("role", "from")) and not names.isdisjoint(("content", "value", "tool_calls"))
