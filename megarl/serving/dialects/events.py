"""Server-sent events: their bytes, and texts in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_PIECE_CHARACTERS = 256
"""Characters of a text in one event."""
COMMENT = b": keep-alive\n\n"
"""A line beginning with a colon is a comment: it keeps a connection alive, and clients skip it."""


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return an event carrying `data` as JSON. Without a `name` it has a data line only."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """Split a text into pieces short enough for one event each."""
    for start in range(0, len(text), _PIECE_CHARACTERS):
        yield text[start : start + _PIECE_CHARACTERS]
