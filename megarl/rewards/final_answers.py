"""Final answer stated in a completion: in a box, in tags, after #### or Answer. Light, because the driver imports
it."""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from megarl.files.import_path import import_object
from megarl.rewards import ANSWER_READERS, kind_of

AnswerForm = Literal["boxed", "tags", "hashes", "answer_line"]
ReadAnswer = Callable[[str, Mapping[str, Any]], str | None]
"""Function reading the final answer from a completion and its record."""

GSM8K_FORMS: tuple[Literal["hashes", "boxed"], ...] = ("hashes", "boxed")
"""Default forms of `gsm8k`, replaced by its keyword argument `forms`."""
MATH_COMPETITION_FORMS: tuple[Literal["boxed"], ...] = ("boxed",)
"""Default forms of `math_competition`, replaced by its keyword argument `forms`."""
NUMBER = r"-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
"""Regular expression of a number as written in grade-school solutions."""
MARKED_NUMBER = re.compile(rf"####[ \t]*[*_$]*\\?({NUMBER})")
"""#### and the following number, possibly in bold or between dollar signs."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_OPENING_BRACE = re.compile(r"\s*\{")
_BARE = re.compile(
    r"[ \t]*(?!\\(?:boxed|fbox))(?=[-+.(\[\\0-9]|[A-Za-z](?![A-Za-z]))"
    r"(?:(?P<dollars>[^$\n]*)\$|(?P<formula>(?:\\.|[^\s$\\])+))",
    re.ASCII,
)
"""Contents of a box without braces, beginning with a sign, a digit, a command or a single letter."""
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_OPEN, _CLOSE = _TAGS[2:]
_ANSWER_LABEL = re.compile(r"\banswer[ \t]*+:", re.IGNORECASE)


def last_box(text: str) -> tuple[int, str] | None:
    """Return the start of the last box and its contents. None: there is no box, or the last is not closed.

    A box is \\boxed{4}, \\boxed {4}, \\fbox{4}, or \\boxed 4. Without braces the contents are a formula up to the next
    space, or up to a dollar sign in the same line.
    """
    # Search backwards: scanning a long text from its start for each box would be quadratic.
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
    # One search for each command: a search for both from every box would scan the text up to each box.
    places = heapq.merge(_places_from_the_end(text, "\\boxed"), _places_from_the_end(text, "\\fbox"), reverse=True)
    for start in places:
        command = _BOX.match(text, start)
        if command is not None:
            yield command


def _places_from_the_end(text: str, command: str) -> Iterator[int]:
    start = len(text)
    while (start := text.rfind(command, 0, start)) >= 0:
        yield start


def _until_brace(text: str, start: int) -> str | None:
    """Return the text up to the brace closing the group opened before `start`. None: it is not closed."""
    position = start
    depth = 1
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # An escaped brace is a character, not a group.
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position]
        position += 1
    return None


def last_boxed(text: str) -> str | None:
    """Return the contents of the last box. None: there is no box, or the last is not closed."""
    found = last_box(text)
    return None if found is None else found[1]


def marked_line(text: str, marked: re.Match[str]) -> str:
    """Return the text behind ####, up to the end of the line, or up to a tag or another ####."""
    end = text.find("\n", marked.end())
    line = text[marked.start() : len(text) if end < 0 else end].removeprefix("####")
    return re.split(r"<|####", line, maxsplit=1)[0]


def last_tagged(text: str) -> str | None:
    """Return the contents of the last <answer>...</answer>. None: there is none."""
    found = last_tags(text)
    return None if found is None else found[1]


def last_tags(text: str) -> tuple[int, str] | None:
    """Return the start of the last <answer>...</answer>, and its contents. None: there is none."""
    end = text.rfind(_CLOSE)
    while end >= 0:
        before = text.rfind(_CLOSE, 0, end)
        # Take the first opening tag after the previous closing one, so that nested opening tags are contents.
        start = text.find(_OPEN, before + 1, end)
        if start >= 0:
            return start, text[start + len(_OPEN) : end]
        end = before
    return None


def _last_answer_line(text: str) -> tuple[int, str] | None:
    """Return the start of the answer in the last line `Answer: x`, and x. None: there is none."""
    end = len(text)
    while end >= 0:
        start = text.rfind("\n", 0, end) + 1
        label = _ANSWER_LABEL.search(text, start, end)
        if label and (said := text[label.end() : end].strip()):
            return label.end(), said
        end = start - 1
    return None


def last_stated(text: str, forms: Collection[AnswerForm]) -> tuple[AnswerForm, str] | None:
    """Return the last answer in one of these forms, with its form. None: there is none.

    boxed: \\boxed{x}; tags: <answer>x</answer>; hashes: `#### 42`, a number; answer_line: a line `Answer: x`, with or
    without a box around x. The running time is linear in the text's length.
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
    """Return whether each of the four tags occurs exactly once, in order, and the text ends with the last."""
    places = [completion_text.find(tag) for tag in _TAGS]
    return (
        all(completion_text.count(tag) == 1 for tag in _TAGS)
        and places == sorted(places)
        and completion_text.endswith(_TAGS[-1])
    )


def without_thoughts(text: str) -> str:
    """Return the text after its last </think>, or all of it without one."""
    return text.rpartition("</think>")[2]


def boxed_answer(text: str, record: Mapping[str, Any], **kwargs: Any) -> str | None:
    """Return the answer scored by `boxed`."""
    return last_boxed(text)


def tagged_answer(text: str, record: Mapping[str, Any], **kwargs: Any) -> str | None:
    """Return the final answer in the last answer tags of a completion, as scored by the function
    `think_answer_tags`."""
    return last_tagged(text)


def competition_answer(
    text: str,
    record: Mapping[str, Any],
    *,
    forms: Collection[AnswerForm] = MATH_COMPETITION_FORMS,
    thoughts: Literal["optional", "required"] = "optional",
    **kwargs: Any,
) -> str | None:
    """Return the answer scored by `math_competition`, after the last </think>. None: there is none in a valid
    format."""
    if thoughts == "required" and _TAGS[1] not in text:
        return None
    stated = last_stated(without_thoughts(text), forms)
    return None if stated is None else stated[1]


def gold_answers(answer: Any) -> list[str]:
    """Return the gold answers without a box around them. Raises ValueError if there is none."""
    given = answer if isinstance(answer, list) else [answer]
    # bool is a subclass of int, but True is not an answer.
    texts = [str(one) for one in given if isinstance(one, str | int | float) and not isinstance(one, bool)]
    if not texts or len(texts) < len(given):
        raise ValueError(f"the gold answer is {answer!r:.80}; give a text, or a list of texts that are all right")
    return [text if (inside := last_boxed(text)) is None else inside for text in texts]


def check_gold_answers(answer: Any, record: Mapping[str, Any], **kwargs: Any) -> None:
    """Raise ValueError for a record that `math_competition` cannot score."""
    gold_answers(answer)


def reader_of(functions: Sequence[tuple[str, Mapping[str, Any]]]) -> ReadAnswer | None:
    """Return a function reading the final answer from a completion, by the first reward function with a known format.

    Functions are given by name with their keyword arguments. None: no function says where an answer is.
    """
    for name, kwargs in functions:
        path = ANSWER_READERS.get(kind_of(name))
        if path is not None:
            return partial(import_object(path, "reward.functions"), **kwargs)
    return None
