"""Overrides that a program writes for a recipe (`trainer.tp=4`). YAML reads their values back as they were."""

from __future__ import annotations

import json
import re
from typing import Any

# The first alternative matches escaped backslashes, so that a literal text \ud83d stays as it is.
_PAIR = re.compile(r"(\\\\)|\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")


def override_text(name: str, value: Any) -> str:
    return f"{name}={as_yaml(value)}"


def short_override(name: str, value: Any) -> str:
    """Return the override of a recipe field as a user would write it: `name=[a,b]`, or its removal for None.

    `value` is a number, a truth value, a plain word, or a tuple of plain words. In a shell the text needs quotes.
    """
    # pydantic is imported late, so that `megarl --help` is fast.
    from megarl.config.schema import removal

    if value is None:
        return removal(name)
    if isinstance(value, tuple):
        return f"{name}=[{','.join(value)}]"
    if isinstance(value, bool):
        return f"{name}={str(value).lower()}"
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"


def as_yaml(value: Any) -> str:
    """Return a JSON value as JSON text that YAML reads as the same value.

    JSON escapes an emoji as two surrogates. YAML reads these as two broken characters; its own escape has eight digits.
    """
    return _PAIR.sub(_join_surrogates, json.dumps(value))


def _join_surrogates(match: re.Match[str]) -> str:
    if match[1]:
        return match[1]
    character: str = json.loads(f'"{match[0]}"')
    return f"\\U{ord(character):08x}"
