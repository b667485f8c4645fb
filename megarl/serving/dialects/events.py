"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_PIECE_CHARACTERS = 256
"""Characters of a text in one event."""
COMMENT = b": keep-alive\n\n"
"""Keeps a connection alive. A line beginning with a colon is a comment, which clients skip."""


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return an event with `data` as JSON. Without a `name` it has a data line only."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def split_text(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE_CHARACTERS):
        yield text[start : start + _PIECE_CHARACTERS]
