"""The final answer that a completion states in a reward function's format. Light: the driver imports it too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_OPENING = r"\boxed{"
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """The contents of the last \\boxed{}, up to its matching brace; None without a box or if the last is not closed."""
    start = text.rfind(_OPENING)
    if start < 0:
        return None
    start = position = start + len(_OPENING)
    depth = 1
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # an escaped brace is a character, not a group
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position]
        position += 1
    return None


def last_in_tags(text: str) -> str | None:
    """The contents of the last <answer>...</answer>; None without one."""
    found = _TAGS.findall(text)
    return found[-1] if found else None


READERS: dict[str, Callable[[str], str | None]] = {"boxed": last_boxed, "think_answer_tags": last_in_tags}
"""How the final answer is read in the format of a function of `REWARDS`."""


def reader_of(names: Iterable[str]) -> Callable[[str], str | None] | None:
    """The reader of the first of these reward functions that has one; None: their completions state no answer."""
    return next((READERS[name] for name in names if name in READERS), None)
