"""The choices of a multiple-choice question, their letters, and the gold choice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megarl.rewards.functions.choice_statements import REASON, withdrawal_letters
from megarl.rewards.maths.choice_letters import NamedChoice, read_choice

Gold = Literal["letter", "text", "index"]

_FIELDS = ("choices", "options")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_MARKS = " \t\n*_$`\"'"
_SMALL_LETTER = re.compile(r"[(\[{]?[a-z][)\]}.:]*")
_WITH_REASON = re.compile(rf"\(?([A-Z])[).:]?,?\s+{REASON}")
_WITH_OWN_TEXT = re.compile(r"\(?([A-Z])\b\)?(?:[.:)]|\s+[-\u2013\u2014]+(?=\s))?\s+(.*)")
"""Matches a letter with a text after it, possibly the choice's text: `C - blue`, `(A) A and B`."""


@dataclass(frozen=True, slots=True)
class Choices:
    """A question's choices: their labels, and their texts if the record has them."""

    labels: tuple[str, ...]
    texts: tuple[str, ...] = ()

    @property
    def letters(self) -> str:
        return LETTERS[: len(self.labels)]

    def letter(self, text: str) -> str | None:
        """Return the letter of the choice with this label, text or letter, or None."""
        return self.by_label(text) or self.by_text(text) or self.by_letter(text)

    def text_of(self, letter: str) -> str:
        """Return the text of the choice with this letter. Empty: the record has only labels."""
        return self.texts[LETTERS.index(letter)] if self.texts else ""

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
        return any(other != letter and other in self.letters for other in withdrawal_letters(text))

    def by_index(self, name: str) -> str | None:
        """Return the letter of the choice with an index from 0. None: no such choice, or the labels are numbers."""
        text = name.strip()
        is_index = text.isdecimal() and not any(label.isdecimal() for label in self.labels)
        return LETTERS[int(text)] if is_index and len(text) < 3 and int(text) < len(self.labels) else None


def choices_of(record: Mapping[str, Any], field: str | None = None, num_choices: int | None = None) -> Choices:
    """Return the choices of a record. Raises ValueError if they have an unknown format."""
    if field is not None and field not in record:
        raise ValueError(f"the record has no field {field!r} with its choices (kwargs.field)")
    name = field or next((name for name in _FIELDS if record.get(name)), None)
    if name is None:
        if num_choices is not None and not (type(num_choices) is int and 2 <= num_choices <= len(LETTERS)):
            raise ValueError(f"kwargs.num_choices = {num_choices!r}: is not valid; set it to 2 to {len(LETTERS)}")
        return Choices(tuple(LETTERS[: num_choices or len(LETTERS)]))
    value = record[name]
    # Three forms: texts with labels (ARC), an object of label and text, or a list of texts.
    if isinstance(value, Mapping) and isinstance(value.get("text"), Sequence) and not isinstance(value["text"], str):
        texts, labels = list(value["text"]), list(value.get("label") or LETTERS[: len(value["text"])])
    elif isinstance(value, Mapping):
        texts, labels = list(value.values()), list(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        texts, labels = list(value), list(LETTERS[: len(value)])
    else:
        texts, labels = [], []
    if len(texts) != len(labels) or not 2 <= len(texts) <= len(LETTERS):
        raise ValueError(
            f"the record's field {name} is {value!r:.80}; give a list or object of 2 to {len(LETTERS)} texts"
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


def _letter_of_name(text: str, names: Sequence[str]) -> str | None:
    plain = _strip_marks(text).casefold()
    plain_names = [_strip_marks(name).casefold() for name in names]
    return LETTERS[plain_names.index(plain)] if plain_names.count(plain) == 1 else None


def _strip_marks(text: str) -> str:
    # Twice, because a full stop may stand within the marks or after them.
    return _WRAPPED.sub(r"\1", text).strip(_MARKS).rstrip(".").strip(_MARKS)
