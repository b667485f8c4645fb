"""Reward for the letter of the right choice in a multiple-choice question."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megarl.rewards.functions.final_answers import answering_text, last_box, last_tags
from megarl.rewards.maths.choice_letters import ALSO_RIGHT, NamedChoice, read_choice
from megarl.rewards.maths.spelling import with_ascii_signs
from megarl.thoughts import without_thoughts
from megarl.types import Reward

Gold = Literal["letter", "text", "index"]

_FIELDS = ("choices", "options")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_MARKS = " \t\n*_$`\"'"
_SMALL_LETTER = re.compile(r"[(\[{]?[a-z][)\]}.:]*")
_REASON = r"(?i:since|because|as(?!\s+well\b)|due\s+to|given)\b"
_WITH_REASON = re.compile(rf"\(?([A-Z])[).:]?,?\s+{_REASON}")
_OPENED = r"(?:\\[(\[]|\\(?:text|textbf|mathrm|mathbf)\s*\{|[\s*_$`\"'\u201c\u2018\[{(])*+"
"""Matches signs before a letter: dollar signs, bold marks, quotes, brackets."""
_CLOSED = r"(?:\\[)\]]|[*_$`\"'\u201d\u2019\]})])*+"
"""Matches signs after a letter: dollar signs, bold marks, quotes, brackets."""
_GOES_ON = (
    r"(?:(?<=[)\]}])(?!\s*(?:[-+*/^=<>]|\(?[A-Z]\b))"
    r"|(?=[ \t]*+(?:[.,:;!。]|$|[-\u2013\u2014]+\s++(?![A-Z]\b)|\((?!\s*(?i:or|and)\b|\s*[A-Z]\s*\))"
    rf"|{_REASON}|(?i:which|not|by|according|rather\s+than|instead\s+of|or|and|as\s+well\s+as)\b|[/&])))"
)
"""Matches the text after a stated letter: the end of a statement, its reason, or a second choice.

Further words show that the letter is not the whole answer: `the answer is A number`, `the answer is C if`.
"""
_LETTER = rf"{_OPENED}(?:([A-Z])|(?<=\()([a-z])(?=\))|([a-z])(?=[*_$]*[.!]*\s*$)){_CLOSED}{_GOES_ON}"
_IS = r"(?i:\s+(?:is|(?:should|must|would|has\s+to)\s+be)\b(?:\s+(?:clearly|therefore|thus|then|either|both)\b)?)"
_STATED = re.compile(
    rf"\b(?i:answer|choice|option)\b(?:{_IS}(?:[\s*_]*+[:=])?|[\s*_]*+[:=]|\s+[-\u2013\u2014]+(?=\s))[\s*_]*+"
    rf"(?i:(?:option|choice)\s+)?{_LETTER}"
    rf"|答案(?:应该|应)?[是为选:]+\s*{_LETTER}"
    r"|(?<!not )(?<!n't )\b(?i:choose|chose|pick|select|go\s+with)\s+(?i:(?:option|choice|answer)\s+)?" + _LETTER,
    re.MULTILINE,
)
"""Matches a text stating the answer: `the answer is (B)`, but not a mention (`since option A, ...`)."""
_CALLED_RIGHT = re.compile(
    rf"(?:(?i:so|thus|therefore|hence),?\s+)?(?i:(?:option|choice|answer)\s+)?{_OPENED}([A-Z]){_CLOSED}"
    r"\s+is\s+(?i:(?:(?:the|my)\s+)?(?:(?:(?:final\s+)?answer|(?:correct|right|best)(?:\s+(?:answer|option|choice|one))?)))"
    r"[\s*_$]*[.!]*"
)
"""Matches a whole line that calls a choice right: `So option (B) is the correct answer.`"""
_LABELLED = re.compile(r"(?i:(?:(?:the|my|final|correct)\s+){0,2}(?:answer|choice|option))[\s*_]*[:=](.*)")
_STATED_TEXT = re.compile(rf"\b(?i:answer|choice|option)\b(?:{_IS}(?:[\s*_]*+[:=])?|[\s*_]*+[:=])(.*)")
"""Matches a text stating the answer without a letter: `the answer is blue`."""
_BEFORE_STATED = r"(?:(?:or +not|that|if|whether|why|the|my|our|this|correct|right|best|final) +)*$"
_SAID = (
    r"(?:accept|agree|believe|certain|claim|claiming|conclude|convinced|know|mean|say|saying|see|sure|think"
    r"|(?:be|clear|follow|likely|the +case|true)(?= +(?:that|if|whether|why)\b))"
)
_NOT_STATED = re.compile(
    rf"(?i:\b(?:if|whether|unless|suppose|assume|assuming) +(?:(?:we|you|one|i) +(?:\w+ +){{0,2}})?{_BEFORE_STATED}"
    rf"|(?:\b(?:not|never|cannot)|n't) +(?:(?:\w+ +){{0,3}}{_SAID} +{_BEFORE_STATED}|(?:to +)?$)"
    rf"|\bno +(?:reason|need|way) +(?:to +(?:\w+ +)?)?{_BEFORE_STATED}"
    rf"|\b(?:wrong|incorrect|false) +(?:that|to +\w+) +{_BEFORE_STATED}"
    rf"|(?<!no )(?<!without )(?<!without a )\bdoubt +{_BEFORE_STATED}"
    rf"|(?<!is )(?<!'s )(?<!see )(?<!shows )(?<!explains )(?<!reason )\bwhy +{_BEFORE_STATED})"
)
"""Matches words before a statement that make it a negation, a condition or a question.

A negation further before belongs to another statement: `since A is not blue the answer is`.
"""
_MAX_CHARACTERS_BEFORE = 100
"""Characters before a stated answer in which `_NOT_STATED` looks for a negation, a condition or a question."""
_WITH_OWN_TEXT = re.compile(r"\(?([A-Z])\b\)?(?:[.:)]|\s+[-\u2013\u2014]+(?=\s))?\s+(.*)")
"""Matches a letter with a text after it, possibly the choice's text: `C - blue`, `(A) A and B`."""
_BEFORE_TEXT = re.compile(r"[\s.,:(*]*(?:[-\u2013\u2014]+\s)?\s*")
"""Matches signs between a stated letter and the choice's text."""
_WRONG = (
    r"[\s)\]}*_]+(?:(?:,|and|or|[A-Z])\b[\s,]*)*+(?i:(?:is|are|was|seems|looks)\s+(?:\w+\s+)?"
    r"(?:wrong|incorrect|false|not)\b|(?:is|are|does|do)n't\b|does\s+not\b)"
)
"""Matches words after a letter that call its choice wrong."""
_NAMED = r"[\s*_]*(?i:(?:option|choice)\s+)?[(\[{]?"
_JOINED = r"(?i:or|and|/|&|as\s+well\s+as|plus|alternatively|then|maybe|perhaps|possibly|also|else)"
"""Matches a word joining a second choice to the first."""
_CONTRASTED = r"(?i:(?:al)?though|but|while|however|yet)[\s,]*"
"""Matches a word of contrast before another choice: `but C is right too`, `but C is wrong`."""
_TOO = r"[^.,;:\n]*\b(?i:also|too|equally|as\s+well)\b"
_SECOND = re.compile(
    rf"[\s*_.():,;\[\]{{}}]*+(?:(?:{_JOINED}[\s,]*)+{_NAMED}(?!I\s+[a-z])[A-Z]\b(?!{_WRONG})"
    rf"|{_CONTRASTED}{_NAMED}(?!I\s+[a-z])(?:{ALSO_RIGHT}|[A-Z]\b(?!{_WRONG}){_TOO})"
    rf"|(?<=[\s*_.():,;\[\]{{}}]){_NAMED}{ALSO_RIGHT})"
    rf"|[ \t*_)]*[,;]{_NAMED}[A-Z][)*_}}\]]*(?=[ \t]*(?:[,;.!\n]|(?i:and|or)\b|{_REASON}|$))"
    r"(?![^.\n]*\b(?i:wrong|incorrect|false|not|eliminated|excluded)\b)"
    r"|[ \t*_)]*\.[ \t*_]*\(?[A-Z][.)*_]*[ \t]*(?:\n|$)"
)
"""Matches a text naming a second choice after the first.

Exceptions are choices called wrong (`B; A, C are wrong`) and the word I (`B, and I think`).
"""
_WITHDRAWAL = re.compile(
    r"(?:^|[.,;:!?\u2026\u2013\u2014(-])[\s*_]*(?i:(?:no|nope|sorry|oops|hm+|correction)(?=[\s*_]*[.,:;!\u2026-]|\s+wait\b)"
    r"|(?:wait|actually|on\s+(?:second\s+thoughts?|reflection)|scratch\s+that|i\s+(?:made\s+a\s+mistake|was\s+wrong))\b)"
    r"([^\n]*)"
)
"""Matches words that withdraw a statement, with the rest of their line: `No, it is A`, `Actually, A`."""
_MENTIONED = re.compile(
    rf"(?<![\w'])(?<!\bnot )(?<!than )(?<!instead of )(?!A\s+(?!is\b)[a-z])([A-Z])(?![\w'])(?!{_WRONG})"
)
"""Matches a letter that is not the word A, and is not called wrong."""
_EXAMINED = re.compile(
    r"\b(?i:(?:check|verify|test|try|consider|compare|exclude)(?:ing)?|with|about|at)\s+(?i:with\s+)?"
    r"(?i:(?:option|choice)\s+)?\(?[A-Z]\b\)?"
)
"""Matches a choice that is only examined: `let me check B`."""


@dataclass(frozen=True, slots=True)
class Choices:
    """A question's choices: their labels, and their texts if the record has them."""

    labels: tuple[str, ...]
    texts: tuple[str, ...] = ()

    @property
    def letters(self) -> str:
        return _LETTERS[: len(self.labels)]

    def letter(self, text: str) -> str | None:
        """Return the letter of the choice with this label, text or letter, or None."""
        return self.by_label(text) or self.by_text(text) or self.by_letter(text)

    def by_label(self, text: str) -> str | None:
        return _letter_of_name(text, self.labels)

    def by_text(self, text: str) -> str | None:
        return _letter_of_name(text, self.texts)

    def by_own_name(self, text: str) -> str | None:
        """Return the letter of the choice if the text is its label, its text, or its letter and its text."""
        plain = _strip_marks(_strip_marks(text).rstrip("!"))
        return self.by_label(text) or self.by_text(text) or self.by_text(plain) or self.by_letter_and_text(plain)

    def by_letter(self, text: str) -> str | None:
        """Return the letter of a choice if the text is this letter or begins with it.

        None: the text begins with no choice's letter, or another choice's text follows.
        """
        # "B!" is a letter, but "5!" is a choice's text.
        plain = _strip_marks(_strip_marks(text).rstrip("!"))
        if (letter := self.by_letter_and_text(plain)) is not None:
            return letter
        reason = _WITH_REASON.match(plain)
        if reason:
            choice = NamedChoice(reason[1])
        else:
            choice = read_choice(plain.upper() if _SMALL_LETTER.fullmatch(plain) else plain)
        if choice is None or choice.letter not in self.letters or self.is_withdrawn(choice.letter, choice.text):
            return None
        return choice.letter if self.by_text(choice.text) in (None, choice.letter) else None

    def by_letter_and_text(self, text: str) -> str | None:
        """Return a choice's letter if the text is this letter and the choice's own text: `C - blue`."""
        match = _WITH_OWN_TEXT.fullmatch(text.strip())
        return match[1] if match and self.by_text(match[2]) == match[1] else None

    def is_withdrawn(self, letter: str, text: str) -> bool:
        """Return whether the text after a choice's letter withdraws it and names another choice."""
        withdrawals = (match[1] for match in _WITHDRAWAL.finditer(text))
        mentions = (match[1] for rest in withdrawals for match in _MENTIONED.finditer(_EXAMINED.sub("", rest)))
        return any(mention != letter and mention in self.letters for mention in mentions)

    def by_index(self, name: str) -> str | None:
        """Return the letter of the choice with an index from 0. None: no such choice, or the labels are numbers."""
        text = name.strip()
        is_index = text.isdecimal() and not any(label.isdecimal() for label in self.labels)
        return _LETTERS[int(text)] if is_index and len(text) < 3 and int(text) < len(self.labels) else None


def multiple_choice(
    completion_text: str,
    answer: Any,
    record: Mapping[str, Any],
    *,
    in_thoughts: bool = False,
    correct_score: float = 1.0,
    num_choices: int | None = None,
    field: str | None = None,
    gold: Gold | None = None,
) -> Reward:
    """Score the choice named at the completion's end against the gold choice.

    Choices are in the record's `choices` or `options`, or another `field`: a list, {"label": [...], "text": [...]} or
    {"A": ...}. Without them there are `num_choices`, at most 26. The gold answer is a letter or label, a choice's text,
    or its index from 0. `gold` selects one of these three, and is required if an answer is ambiguous.

    Only the completion after its last </think> is read. A completion ending inside its thoughts has no answer. The
    choice is read from the last box or <answer> tags, else from the last `the answer is (B)`, else from a last line
    that is a choice. A statement may also give the choice's text. A choice withdrawn in its line, or joined to a second
    one, counts as none. The format is valid if this place names exactly one choice. Metrics: `chosen_A`, `chosen_B`,
    ...: the share of answers with this letter. Raises ValueError if the gold answer is not a choice or is ambiguous.
    """
    choices = choices_of(record, field, num_choices)
    right = gold_choice(answer, choices, gold)
    letter = _read_choice(answering_text(completion_text, in_thoughts=in_thoughts), choices)
    # At most 10 letters become metrics, to keep their number small.
    reported_letters = _LETTERS[: min(len(choices.labels), 10)] if choices.texts or num_choices else ""
    metrics = {f"chosen_{name}": float(name == letter) for name in reported_letters}
    is_correct = letter == right
    return Reward(correct_score if is_correct else 0.0, letter is not None, is_correct, metrics=metrics)


def choices_of(record: Mapping[str, Any], field: str | None = None, num_choices: int | None = None) -> Choices:
    """Return the choices of a record. Raises ValueError if they have an unknown format."""
    if field is not None and field not in record:
        raise ValueError(f"the record has no field {field!r} with its choices (kwargs.field)")
    name = field or next((name for name in _FIELDS if record.get(name)), None)
    if name is None:
        if num_choices is not None and not (type(num_choices) is int and 2 <= num_choices <= len(_LETTERS)):
            raise ValueError(f"kwargs.num_choices = {num_choices!r}: is not valid; set it to 2 to {len(_LETTERS)}")
        return Choices(tuple(_LETTERS[: num_choices or len(_LETTERS)]))
    value = record[name]
    if isinstance(value, Mapping) and isinstance(value.get("text"), Sequence) and not isinstance(value["text"], str):
        texts, labels = list(value["text"]), list(value.get("label") or _LETTERS[: len(value["text"])])
    elif isinstance(value, Mapping):
        texts, labels = list(value.values()), list(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        texts, labels = list(value), list(_LETTERS[: len(value)])
    else:
        texts, labels = [], []
    if len(texts) != len(labels) or not 2 <= len(texts) <= len(_LETTERS):
        raise ValueError(
            f"the record's field {name} is {value!r:.80}; give a list or object of 2 to {len(_LETTERS)} texts"
        )
    return Choices(tuple(map(str, labels)), tuple(map(str, texts)))


def gold_choice(answer: Any, choices: Choices, gold: Gold | None = None) -> str:
    """Return the letter of the gold choice. Raises ValueError for an answer that is no choice, or may mean two."""
    text = str(answer).strip()
    readings = {
        "letter": choices.by_label(text) or choices.by_letter(text),
        "text": choices.by_text(text),
        "index": choices.by_index(text),
    }
    if gold is not None and gold not in readings:
        raise ValueError(f"kwargs.gold = {gold!r}: is not a valid value; set it to one of {', '.join(readings)}")
    letters = {kind: letter for kind, letter in readings.items() if letter is not None and gold in (None, kind)}
    if not letters:
        raise ValueError(f"the gold answer {text!r:.80} is not one of the record's {len(choices.labels)} choices")
    if len(set(letters.values())) > 1:
        interpretations = ", ".join(f"{letter} as {kind}" for kind, letter in letters.items())
        raise ValueError(
            f"the gold answer {text!r:.80} is ambiguous: {interpretations}; set kwargs.gold to letter, text or index"
        )
    return next(iter(letters.values()))


def final_answer(
    text: str, record: Mapping[str, Any], *, num_choices: int | None = None, field: str | None = None, **kwargs: Any
) -> str | None:
    """Return the letter of the choice named at a completion's end, like the reward, or None."""
    return _read_choice(answering_text(text), choices_of(record, field, num_choices))


def check_record(
    answer: Any,
    record: Mapping[str, Any],
    *,
    num_choices: int | None = None,
    field: str | None = None,
    gold: Gold | None = None,
    **kwargs: Any,
) -> None:
    """Raise ValueError for a record without choices, or with a gold answer that is no choice."""
    gold_choice(answer, choices_of(record, field, num_choices), gold)


def _read_choice(text: str, choices: Choices) -> str | None:
    """Return the letter of the choice that a completion answers with. None: no choice, or several.

    The first of these in the completion counts: a box or tags, a last line that calls a choice right, a stated answer,
    a last line with only an answer.
    """
    text = with_ascii_signs(without_thoughts(text))
    marks = [match for match in (last_box(text), last_tags(text)) if match is not None]
    if marks:
        return choices.letter(max(marks).text)
    lines = text.strip().splitlines()
    last_line = lines[-1].strip() if lines else ""
    if (called_right := _CALLED_RIGHT.fullmatch(last_line)) and called_right[1] in choices.letters:
        return called_right[1]
    statement = _last_statement(text, choices)
    if statement is not None:
        return _read_agreeing_letter(text, statement, choices)
    stated_text = deque((match for match in _STATED_TEXT.finditer(text) if _is_asserted(match)), maxlen=1)
    if stated_text and (letter := choices.by_own_name(stated_text[0][1])) is not None:
        return letter
    label = _LABELLED.fullmatch(last_line)
    return choices.letter(label[1] if label else last_line)


def _last_statement(text: str, choices: Choices) -> re.Match[str] | None:
    """Return the last statement of a choice's letter. `the answer is I think` states no choice."""
    statements = (
        match for match in _STATED.finditer(text) if _letter_of(match) in choices.letters and _is_asserted(match)
    )
    return next(iter(deque(statements, maxlen=1)), None)


def _is_asserted(statement: re.Match[str]) -> bool:
    """Return whether a statement is meant: not after words such as `I doubt that` or `if`."""
    before = statement.string[max(0, statement.start() - _MAX_CHARACTERS_BEFORE) : statement.start()]
    return _NOT_STATED.search(before) is None


def _read_agreeing_letter(text: str, statement: re.Match[str], choices: Choices) -> str | None:
    """Return the letter in a statement such as `the answer is C`.

    None: it names a second choice too, or the text of another choice follows the letter (`C, red`, where red is B).
    """
    # "the answer is A or B" names two choices, so it counts as none.
    if _SECOND.match(text, statement.end()):
        return None
    letter = _letter_of(statement)
    if choices.is_withdrawn(letter, text[statement.end() :]):
        return None
    rest_of_line = text[statement.end() :].partition("\n")[0]
    letter_of_text = choices.by_text(_BEFORE_TEXT.sub("", rest_of_line, count=1).rstrip(" \t).!*"))
    return letter if letter_of_text in (None, letter) else None


def _letter_of(statement: re.Match[str]) -> str:
    return next(letter for letter in statement.groups() if letter is not None).upper()


def _letter_of_name(text: str, names: Sequence[str]) -> str | None:
    """Return the letter of the only choice in `names` that equals `text`, or None."""
    plain = _strip_marks(text).casefold()
    plain_names = [_strip_marks(name).casefold() for name in names]
    return _LETTERS[plain_names.index(plain)] if plain_names.count(plain) == 1 else None


def _strip_marks(text: str) -> str:
    # Twice, because a full stop may stand within the marks or after them.
    return _WRAPPED.sub(r"\1", text).strip(_MARKS).rstrip(".").strip(_MARKS)
