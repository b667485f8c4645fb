"""The final answer that a completion states: in a box, in tags, after #### or Answer. Light: the driver imports it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

AnswerForm = Literal["boxed", "tags", "hashes", "answer_line"]

GSM8K_FORMS: tuple[Literal["hashes", "boxed"], ...] = ("hashes", "boxed")
"""The forms of `gsm8k` unless its keyword argument `forms` says otherwise."""
MATH_COMPETITION_FORMS: tuple[Literal["boxed"], ...] = ("boxed",)
"""The forms of `math_competition` unless its keyword argument `forms` says otherwise."""
NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
"""A regular expression of a number as grade-school solutions write it."""
MARKED_NUMBER = re.compile(rf"####[ \t]*({NUMBER})")

_OPENING = r"\boxed{"
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ANSWER_LINE = re.compile(r"(?im)^.*?\banswer\s*:[ \t]*(\S.*?)[ \t]*$")


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


def last_tagged(text: str) -> str | None:
    """The contents of the last <answer>...</answer>; None without one."""
    found = _ANSWER.findall(text)
    return found[-1] if found else None


def last_stated(text: str, forms: Collection[AnswerForm]) -> tuple[AnswerForm, str] | None:
    """The answer that stands last in one of these forms, with its form; None without one.

    boxed: \\boxed{x}; tags: <answer>x</answer>; hashes: `#### 42`, a number; answer_line: a line `Answer: x`, where x
    may have a box around it.
    """
    found: list[tuple[int, AnswerForm, str]] = []
    if "hashes" in forms and (marked := list(MARKED_NUMBER.finditer(text))):
        found.append((marked[-1].start(), "hashes", marked[-1][1]))
    if "boxed" in forms and (contents := last_boxed(text)) is not None:
        found.append((text.rfind(_OPENING), "boxed", contents))
    if "answer_line" in forms and (lines := list(_ANSWER_LINE.finditer(text))):
        said = lines[-1][1]
        inside = last_boxed(said)
        found.append((lines[-1].start(1), "answer_line", said if inside is None else inside))
    if "tags" in forms and (contents := last_tagged(text)) is not None:
        found.append((text.rfind("<answer>"), "tags", contents))
    if not found:
        return None
    _, form, answer = max(found, key=lambda each: each[0])
    return form, answer


def has_valid_tags(completion_text: str) -> bool:
    """Whether each of the four tags occurs exactly once, in order, and the text ends with the last."""
    places = [completion_text.find(tag) for tag in _TAGS]
    return (
        all(completion_text.count(tag) == 1 for tag in _TAGS)
        and places == sorted(places)
        and completion_text.endswith(_TAGS[-1])
    )


def without_thoughts(text: str) -> str:
    """The text after its last </think>; all of it without one."""
    return text.rpartition("</think>")[2]


def reader_of(functions: Sequence[tuple[str, Mapping[str, Any]]]) -> Callable[[str], str | None] | None:
    """How the final answer is read from a completion: as the first of these reward functions that has a format does.

    Functions are given by name, with their keyword arguments. None: they say nothing of where an answer stands.
    """
    for name, kwargs in functions:
        if name == "boxed":
            return last_boxed
        if name == "think_answer_tags":
            return last_tagged
        if name == "gsm8k":
            return _reader(kwargs.get("forms", GSM8K_FORMS))
        if name == "math_competition":
            return _reader(kwargs.get("forms", MATH_COMPETITION_FORMS))
    return None


def _reader(forms: Collection[AnswerForm]) -> Callable[[str], str | None]:
    def read(text: str) -> str | None:
        stated = last_stated(without_thoughts(text), forms)
        return None if stated is None else stated[1]

    return read
