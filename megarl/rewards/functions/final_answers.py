"""Readers of a completion's final answer: in a box, in tags, after #### or after `Answer:`.

The module imports quickly, because the driver needs it.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from megarl.files.import_path import import_object
from megarl.rewards import ANSWER_READERS, kind_of
from megarl.thoughts import ends_in_thoughts, without_thoughts

AnswerForm = Literal["boxed", "tags", "hashes", "answer_line"]
ReadAnswer = Callable[[str, Mapping[str, Any]], str | None]
"""Function (completion, record) -> final answer as text, or None."""

GSM8K_FORMS: tuple[Literal["hashes", "boxed"], ...] = ("hashes", "boxed")
"""Answer forms of the reward `gsm8k`, unless its keyword argument `forms` is set."""
MATH_COMPETITION_FORMS: tuple[Literal["boxed"], ...] = ("boxed",)
"""Answer forms of the reward `math_competition`, unless its keyword argument `forms` is set."""
NUMBER = r"-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
"""Matches a number as written in solutions of grade-school problems."""
MARKED_NUMBER = re.compile(rf"####[ \t]*[*_$]*\+?\\?({NUMBER})")
"""Matches #### followed by a number, possibly in bold or between dollar signs (GSM8K)."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[\s\S]|[{}]")
"""Matches a box's beginning, an escaped sign, or a brace."""
_OPENING_BRACE = re.compile(r"\s*\{")
_BARE = re.compile(
    r"[ \t]*(?!\\(?:boxed|fbox))(?=[-+.(\[\\0-9]|[A-Za-z](?![A-Za-z]))"
    r"(?:(?P<dollars>[^$\n]*)\$|(?P<formula>(?:\\.|[^\s$\\])+))",
    re.ASCII,
)
r"""Matches a \boxed without braces. Its contents begin with a sign, a digit, a command or a single letter."""
_GAP = r"(?:[\s$*~]|\\\\|\\[,;:!()\[\] ]|\\q?quad(?![A-Za-z]))*"
_BOX_BEFORE = re.compile(
    r"\\(?:boxed|fbox)\s*\{(?P<contents>(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}"
    rf"{_GAP}(?P<connective>(?:[,;]{_GAP})?(?:\\text\s*\{{\s*(?:or|and)\s*\}}|\b(?:or|and)\b)|[,;]){_GAP}\Z"
)
"""Matches a box and the connective between it and the next box, at the text's end."""
_JOINED_CHARACTERS = 200
_MAX_JOINED = 10
"""Limits of a list of boxes: the characters of a box with its connective, and the number of boxes."""
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_OPEN, _CLOSE = _TAGS[2:]
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_MAX_WORDS_AROUND_BOX = 6
"""Words around the box of a final answer, as in `x = \\boxed{3} meters per second`. A solution has more."""
_ANSWER_LABEL = re.compile(r"\banswer[ \t]*+:", re.IGNORECASE)
_BOLD_MARK = re.compile(r"^\s*\*\*|\*\*\s*$")


class Marked(NamedTuple):
    """A marked answer in a completion: the start index of its mark (or of the answer itself), and its text."""

    start: int
    text: str


def last_box(text: str) -> Marked | None:
    r"""Return the start index and the contents of the last \boxed. None: it is missing or not closed.

    Accepted are \boxed{4}, \boxed {4}, \fbox{4} and \boxed 4. Without braces the contents are a formula up to the next
    space, or up to a dollar sign in the same line. Of nested boxes, the outer one is returned. Boxes joined by a comma,
    `and` or `or` are one answer, a list.
    """
    box = _last_command_box(text)
    if box is None:
        return None
    return _join_boxes(text, _outermost_box(text, box))


def _join_boxes(text: str, box: Marked) -> Marked:
    """Return the box with those before it that are joined to it by a connective."""
    for _ in range(_MAX_JOINED):
        beginning = max(0, box.start - _JOINED_CHARACTERS)
        previous = _BOX_BEFORE.search(text, beginning, box.start)
        if previous is None:
            break
        # Imported here: checks of data records import this module before the run, and hardly ever compare formulas.
        from megarl.rewards.maths.agreement import agreement

        # The same answer in another form, as in \boxed{\frac12} or \boxed{0.5}, is no second answer.
        is_repeated = agreement(previous["contents"], box.text) == 1.0
        connective = " or " if "or" in previous["connective"] else ", "
        box = Marked(previous.start(), box.text if is_repeated else f"{previous['contents']}{connective}{box.text}")
    return box


def _last_command_box(text: str) -> Marked | None:
    """Return the last box by itself. None: there is no box, or the last one is empty or not closed."""
    # Search backwards: scanning a long text from its start for each box would be quadratic.
    for command in _match_commands_from_the_end(text):
        opening = _OPENING_BRACE.match(text, command.end())
        if opening is not None:
            contents = _read_until_brace(text, opening.end())
            return None if contents is None else Marked(command.start(), contents)
        bare = _BARE.match(text, command.end())
        if bare is not None:
            contents = (bare["dollars"] or bare["formula"]).rstrip(".,;: ")
            return Marked(command.start(), contents) if contents else None
    return None


def _outermost_box(text: str, box: Marked) -> Marked:
    """Return the outermost box that encloses `box`."""
    if text.find("\\boxed", 0, box.start) < 0 and text.find("\\fbox", 0, box.start) < 0:
        return box
    # For each open brace: the start of its box and of the contents, or None. One pass takes linear time.
    open_groups: list[tuple[int, int] | None] = []
    num_open_boxes = 0
    for sign in _BOX_OR_BRACE.finditer(text):
        if sign.start() >= box.start and num_open_boxes == 0:
            break
        if sign[0].endswith("{") and sign[0] != "\\{":
            is_box = len(sign[0]) > 1
            num_open_boxes += is_box
            open_groups.append((sign.start(), sign.end()) if is_box else None)
        elif sign[0] == "}" and open_groups and (group := open_groups.pop()) is not None:
            num_open_boxes -= 1
            start, contents = group
            if start <= box.start < sign.start():
                box = Marked(start, text[contents : sign.start()])
    return box


def _match_commands_from_the_end(text: str) -> Iterator[re.Match[str]]:
    # One search for each command. A search for both commands would scan the text anew from each box.
    starts = heapq.merge(_find_from_the_end(text, "\\boxed"), _find_from_the_end(text, "\\fbox"), reverse=True)
    for start in starts:
        command = _BOX.match(text, start)
        if command is not None:
            yield command


def _find_from_the_end(text: str, command: str) -> Iterator[int]:
    start = len(text)
    while (start := text.rfind(command, 0, start)) >= 0:
        yield start


def _read_until_brace(text: str, start: int) -> str | None:
    """Return the text from `start`, inside a group, up to the group's closing brace. None: the group is not closed."""
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
    r"""Return the contents of the last \boxed{}. None: it is missing or not closed."""
    box = last_box(text)
    return None if box is None else box.text


def read_marked_line(text: str, mark: re.Match[str]) -> str:
    """Return the text after a #### (`mark`) up to the line's end, a tag or another ####."""
    end = text.find("\n", mark.end())
    line = text[mark.start() : len(text) if end < 0 else end].removeprefix("####")
    return re.split(r"<|####", line, maxsplit=1)[0]


def last_tagged(text: str) -> str | None:
    """Return the text in the last <answer>...</answer> outside of <think>...</think>, or None."""
    # The tags may stand before the thoughts: then only the format is wrong.
    tags = last_tags(without_thoughts(_THOUGHTS.sub("", text)))
    return None if tags is None else tags.text


def last_tags(text: str) -> Marked | None:
    """Return the start index of the last <answer>...</answer> and the text in it, or None."""
    end = text.rfind(_CLOSE)
    while end >= 0:
        previous_end = text.rfind(_CLOSE, 0, end)
        # Take the first opening tag after the previous closing one, so that nested opening tags are contents.
        start = text.find(_OPEN, previous_end + 1, end)
        if start >= 0:
            return Marked(start, text[start + len(_OPEN) : end])
        end = previous_end
    return None


def _last_answer_line(text: str) -> Marked | None:
    """Return the start index and the text of the answer in the last line `Answer: x`, or None."""
    end = len(text)
    while end >= 0:
        start = text.rfind("\n", 0, end) + 1
        label = _ANSWER_LABEL.search(text, start, end)
        if label and (answer := _BOLD_MARK.sub("", text[label.end() : end]).strip()):
            return Marked(label.end(), answer)
        end = start - 1
    return None


def find_last_answer(text: str, forms: Collection[AnswerForm]) -> tuple[AnswerForm, str] | None:
    r"""Return the last answer in one of these forms, with its form, or None.

    boxed: \boxed{x}; tags: <answer>x</answer>; hashes: `#### 42`, a number; answer_line: a line `Answer: x`, with or
    without a box around x. The running time is linear in the text's length.
    """
    statements: list[tuple[int, AnswerForm, str]] = []
    if "hashes" in forms and (marks := deque(MARKED_NUMBER.finditer(text), maxlen=1)):
        statements.append((marks[0].start(), "hashes", read_marked_line(text, marks[0])))
    if "boxed" in forms and (box := last_box(text)) is not None:
        statements.append((box.start, "boxed", box.text))
    if "answer_line" in forms and (line := _last_answer_line(text)):
        boxed_text = last_boxed(line.text)
        statements.append((line.start, "answer_line", line.text if boxed_text is None else boxed_text))
    if "tags" in forms and (tags := last_tags(text)):
        statements.append((tags.start, "tags", tags.text))
    if not statements:
        return None
    _, form, answer = max(statements, key=lambda statement: statement[0])
    return form, answer


def has_valid_tags(completion_text: str) -> bool:
    """Return whether <think>, </think>, <answer>, </answer> occur once each, in this order, with </answer> at the
    end.
    """
    positions = [completion_text.find(tag) for tag in _TAGS]
    return (
        all(completion_text.count(tag) == 1 for tag in _TAGS)
        and positions == sorted(positions)
        and completion_text.endswith(_TAGS[-1])
    )


def answering_text(text: str, *, in_thoughts: bool = False) -> str:
    """Return the whole completion, or an empty text if it ended inside its thoughts.

    `in_thoughts` comes from the tokens: if the prompt opened the thoughts, the text does not show them.
    """
    return "" if in_thoughts or ends_in_thoughts(text) else text


def final_text(text: str, *, in_thoughts: bool = False) -> str:
    """Return the completion after its thoughts. An answer inside thoughts was only considered."""
    return without_thoughts(answering_text(text, in_thoughts=in_thoughts))


def read_boxed_answer(text: str, record: Mapping[str, Any], **kwargs: Any) -> str | None:
    r"""Return the contents of the last \boxed{} as the final answer, like the reward `boxed`. None: no closed box."""
    return last_boxed(final_text(text))


def read_tagged_answer(text: str, record: Mapping[str, Any], **kwargs: Any) -> str | None:
    """Return the contents of the last answer tags, like the reward `think_answer_tags`, or None."""
    return last_tagged(answering_text(text))


def read_competition_answer(
    text: str,
    record: Mapping[str, Any],
    *,
    forms: Collection[AnswerForm] = MATH_COMPETITION_FORMS,
    thoughts: Literal["optional", "required"] = "optional",
    **kwargs: Any,
) -> str | None:
    """Return the final answer after the last </think>, like the reward `math_competition`.

    None: no answer is in one of the `forms`, or the thoughts are not closed.
    """
    text = answering_text(text)
    if thoughts == "required" and _TAGS[1] not in text:
        return None
    statement = find_last_answer(without_thoughts(text), forms)
    return None if statement is None else statement[1]


def gold_texts(answer: Any) -> list[str]:
    """Return the acceptable gold answers as written in the data. Raises ValueError if there is none."""
    alternatives = answer if isinstance(answer, list) else [answer]
    # bool is a subclass of int, but True is not an answer.
    texts = [str(text) for text in alternatives if isinstance(text, str | int | float) and not isinstance(text, bool)]
    if not texts or len(texts) < len(alternatives):
        raise ValueError(f"the gold answer is {answer!r:.80}; give a text, or a list of texts that are all right")
    return texts


def gold_answers(answer: Any) -> list[str]:
    r"""Return the acceptable gold answers, each without a \boxed{} around it. Raises ValueError if there is none."""
    return [text if (inside := last_boxed(text)) is None else inside for text in gold_texts(answer)]


def check_gold_answers(answer: Any, record: Mapping[str, Any], **kwargs: Any) -> None:
    """Raise ValueError unless the gold answer is a text, a number or a list of texts and numbers.

    A text that ends with #### is a worked solution: no final answer equals it.
    """
    for text in gold_answers(answer):
        _refuse_marked_solution(text)


def check_gold_answer(answer: Any, record: Mapping[str, Any], **kwargs: Any) -> None:
    r"""Raise ValueError for a gold answer that no final answer can equal: a worked solution, or a list.

    A solution ends with #### and a number, or has its answer in a \boxed{} between words.
    """
    if not isinstance(answer, str):
        raise ValueError(
            f"the gold answer is {answer!r:.80}; give a text. The reward math_competition reads a list of alternatives"
        )
    _refuse_marked_solution(answer)
    if last_box(answer) is not None and len(_WORD.findall(_empty_boxes(answer))) > _MAX_WORDS_AROUND_BOX:
        raise ValueError(
            f"the gold answer is a solution with a box in it, {answer!r:.80}; give the final answer alone, or set the "
            "reward to math_competition, which reads the box"
        )


def check_gold_texts(answer: Any, record: Mapping[str, Any], **kwargs: Any) -> None:
    """Raise ValueError unless the gold answer is a text, a number or a list of texts and numbers."""
    gold_texts(answer)


def _empty_boxes(text: str) -> str:
    for command in _match_commands_from_the_end(text):
        opening = _OPENING_BRACE.match(text, command.end())
        if opening is not None and (contents := _read_until_brace(text, opening.end())) is not None:
            text = text[: opening.end()] + text[opening.end() + len(contents) :]
    return text


def _refuse_marked_solution(text: str) -> None:
    if (mark := MARKED_NUMBER.search(text)) is not None and text[: mark.start()].strip():
        raise ValueError(
            f"the gold answer is a solution that ends with ####, {text!r:.80}; give the number alone, or set the "
            "reward to gsm8k, which reads it"
        )


def find_answer_reader(functions: Sequence[tuple[str, Mapping[str, Any]]]) -> ReadAnswer | None:
    """Return the function that extracts the final answer from a completion; None: no reward function has one.

    It is taken from the first reward function that has one. `functions` are names of reward functions with their
    keyword arguments.
    """
    for name, kwargs in functions:
        path = ANSWER_READERS.get(kind_of(name))
        if path is not None:
            return partial(import_object(path, "reward.functions"), **kwargs)
    return None
