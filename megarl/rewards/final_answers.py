"""The final answer that a completion states: in a box, in tags, after #### or Answer. Light: the driver imports it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from megarl.files.import_path import import_object
from megarl.rewards import ANSWER_READERS, kind_of

AnswerForm = Literal["boxed", "tags", "hashes", "answer_line"]
ReadAnswer = Callable[[str, Mapping[str, Any]], str | None]
"""Reads the final answer from a completion to a record."""

GSM8K_FORMS: tuple[Literal["hashes", "boxed"], ...] = ("hashes", "boxed")
"""The forms of `gsm8k` unless its keyword argument `forms` says otherwise."""
MATH_COMPETITION_FORMS: tuple[Literal["boxed"], ...] = ("boxed",)
"""The forms of `math_competition` unless its keyword argument `forms` says otherwise."""
NUMBER = r"-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
"""A regular expression of a number as grade-school solutions write it."""
MARKED_NUMBER = re.compile(rf"####[ \t]*[*_$]*\\?({NUMBER})")
"""#### and the number behind it, which may be in bold or between dollar signs."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_OPENING_BRACE = re.compile(r"\s*\{")
_BARE = re.compile(
    r"[ \t]*(?!\\(?:boxed|fbox))(?=[-+.(\[\\0-9]|[A-Za-z](?![A-Za-z]))"
    r"(?:(?P<dollars>[^$\n]*)\$|(?P<formula>(?:\\.|[^\s$\\])+))",
    re.ASCII,
)
"""The contents of a box without braces begin with a sign, a digit, a command or a single letter."""
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_OPEN, _CLOSE = _TAGS[2:]
_ANSWER_LABEL = re.compile(r"\banswer[ \t]*+:", re.IGNORECASE)


def last_box(text: str) -> tuple[int, str] | None:
    """Where the last box begins, and its contents; None without a box or if the last is not closed.

    A box is \\boxed{4}, \\boxed {4}, \\fbox{4}, or \\boxed 4: without braces a formula up to the next space, or up to
    a dollar sign in the same line.
    """
    for command in _commands_from_the_end(text):
        opening = _OPENING_BRACE.match(text, command.end())
        if opening is not None:
            contents = _until_brace(text, opening.end())
            return None if contents is None else (command.start(), contents)
        bare = _BARE.match(text, command.end())
        if bare is not None:
            contents = (bare["dollars"] or bare["formula"]).rstrip(".,;: ")
            return (command.start(), contents) if contents else None
    return None


def _commands_from_the_end(text: str) -> Iterator[re.Match[str]]:
    end = len(text)
    while (start := max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))) >= 0:
        command = _BOX.match(text, start)
        if command is not None:
            yield command
        end = start + 1


def _until_brace(text: str, start: int) -> str | None:
    """The text up to the brace that closes the group which begins at `start`; None without that brace."""
    position = start
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


def last_boxed(text: str) -> str | None:
    """The contents of the last box; None without a box or if the last is not closed."""
    found = last_box(text)
    return None if found is None else found[1]


def marked_line(text: str, marked: re.Match[str]) -> str:
    """Return the text behind ####, up to the end of the line, or up to a tag or another ####."""
    end = text.find("\n", marked.end())
    line = text[marked.start() : len(text) if end < 0 else end].removeprefix("####")
    return re.split(r"<|####", line, maxsplit=1)[0]


def last_tagged(text: str) -> str | None:
    """The contents of the last <answer>...</answer>; None without one."""
    found = last_tags(text)
    return None if found is None else found[1]


def last_tags(text: str) -> tuple[int, str] | None:
    """Where the last <answer>...</answer> begins, and its contents."""
    end = text.rfind(_CLOSE)
    while end >= 0:
        before = text.rfind(_CLOSE, 0, end)
        start = text.find(_OPEN, before + 1, end)
        if start >= 0:
            return start, text[start + len(_OPEN) : end]
        end = before
    return None


def _last_answer_line(text: str) -> tuple[int, str] | None:
    """Where the answer of the last line `Answer: x` begins, and x."""
    end = len(text)
    while end >= 0:
        start = text.rfind("\n", 0, end) + 1
        label = _ANSWER_LABEL.search(text, start, end)
        if label and (said := text[label.end() : end].strip()):
            return label.end(), said
        end = start - 1
    return None


def last_stated(text: str, forms: Collection[AnswerForm]) -> tuple[AnswerForm, str] | None:
    """The answer that stands last in one of these forms, with its form; None without one.

    boxed: \\boxed{x}; tags: <answer>x</answer>; hashes: `#### 42`, a number; answer_line: a line `Answer: x`, where x
    may have a box around it. The time it takes grows with the text's length alone.
    """
    found: list[tuple[int, AnswerForm, str]] = []
    if "hashes" in forms and (marked := deque(MARKED_NUMBER.finditer(text), maxlen=1)):
        found.append((marked[0].start(), "hashes", marked_line(text, marked[0])))
    if "boxed" in forms and (box := last_box(text)) is not None:
        found.append((box[0], "boxed", box[1]))
    if "answer_line" in forms and (line := _last_answer_line(text)):
        inside = last_boxed(line[1])
        found.append((line[0], "answer_line", line[1] if inside is None else inside))
    if "tags" in forms and (tags := last_tags(text)):
        found.append((tags[0], "tags", tags[1]))
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


def boxed_answer(text: str, record: Mapping[str, Any], **kwargs: Any) -> str | None:
    """The answer that `boxed` scores."""
    return last_boxed(text)


def tagged_answer(text: str, record: Mapping[str, Any], **kwargs: Any) -> str | None:
    """The answer that `think_answer_tags` scores."""
    return last_tagged(text)


def competition_answer(
    text: str,
    record: Mapping[str, Any],
    *,
    forms: Collection[AnswerForm] = MATH_COMPETITION_FORMS,
    thoughts: Literal["optional", "required"] = "optional",
    **kwargs: Any,
) -> str | None:
    """The answer that `math_competition` scores, after the last </think>; None without one in a valid format."""
    if thoughts == "required" and _TAGS[1] not in text:
        return None
    stated = last_stated(without_thoughts(text), forms)
    return None if stated is None else stated[1]


def gold_answers(answer: Any) -> list[str]:
    """The gold answers, each without a box around it. Raises ValueError where there is none."""
    given = answer if isinstance(answer, list) else [answer]
    texts = [str(one) for one in given if isinstance(one, str | int | float) and not isinstance(one, bool)]
    if not texts or len(texts) < len(given):
        raise ValueError(f"the gold answer is {answer!r:.80}; give a text, or a list of texts that are all right")
    return [text if (inside := last_boxed(text)) is None else inside for text in texts]


def check_gold_answers(answer: Any, record: Mapping[str, Any], **kwargs: Any) -> None:
    """Raise ValueError for a record that `math_competition` cannot score."""
    gold_answers(answer)


def reader_of(functions: Sequence[tuple[str, Mapping[str, Any]]]) -> ReadAnswer | None:
    """How the final answer is read from a completion: as the first of these reward functions that has a format does.

    Functions are given by name, with their keyword arguments. None: they say nothing of where an answer stands.
    """
    for name, kwargs in functions:
        path = ANSWER_READERS.get(kind_of(name))
        if path is not None:
            return partial(import_object(path, "reward.functions"), **kwargs)
    return None
