r"""Answers to multiple-choice questions: a choice's letter, optionally with its text: `(C) 12`, `\textbf{(C)}`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from megarl.rewards.maths.spelling import plain_text

_LABEL = re.compile(
    r"^(?i:(?:the\s+)?(?:(?:correct|final)\s+)?(?:option|choice|answer)(?:\s+is\b)?)\s*:?\s*(?=[(\[{]?[A-Z]\b)"
)
_BRACKETED = re.compile(r"(?<![\w\\^)}\]])(?:\[\s*([A-Z])\s*\]|\{\s*([A-Z])\s*\})(?![\w(\[{])")
"""Matches a capital letter in square or curly brackets. They mean the same as round brackets."""
_ALONE = re.compile(r"(?:\(\s*([A-Z])\s*\)|([A-Z])\s*\)?)[.:]?")
_BLANK = r"(?:\s|\\,|\\ |~)"
_WITH_TEXT = re.compile(
    rf"(?:\(\s*([A-Z])\s*\)(?:[.:]?{_BLANK}+(?![-(<>])|(?=[\d.,]+$|[A-Za-z]{{3}}))|([A-Z])\s*[).:]{_BLANK}+)"
    r"(?![\^_+*/=!']|\\(?:cdot|times|div|over|pm|mp|cup|cap|setminus|to|in|le|ge|ne|equiv|approx|mid)(?![A-Za-z]))(\S.*)",
    re.DOTALL,
)
"""Matches a choice's letter, its punctuation and a space, before the choice's text: `A. red`, `(A) red`.

It does not match a formula like `(N) (N-1)`. Without the space only a plain number or a word may follow a bracket:
`(C)12`, `(C)blue`.
"""
ALSO_RIGHT = (
    r"[A-Z]\b[\s)\]}*_]*(?i:(?:is|are|could|can|may|might|would)(?:\s+(?:also|be|equally|just|as|well|the))*"
    r"\s+(?:correct|right|true|valid|possible|plausible|acceptable|answer)\b|also\b|too\b)"
)
"""Matches a text that calls a second choice right too: `C is also correct`."""
_HEDGE = re.compile(
    r"^\W*(?:and|or|not)\b|^\s*[,;/&+]|\b(?:and|or|not|nor|maybe|perhaps)\b.*\b[A-Z]\b|\(\s*[A-Z]\s*\)"
    r"|(?:^|[\s,])[A-Z]\s*[).:](?:\s|$)|^\W*[A-Z](?:[\s,.;/&]+[A-Z])*\W*$|^\W*(?!I\b)[A-Z]\s*[,;&]"
    rf"|(?:^|[.;,]\s+){ALSO_RIGHT}"
)
"""Matches a text naming a second choice after the first, except lists of statements: `I, II`."""


class NamedChoice(NamedTuple):
    """A choice as an answer names it: its letter, and its text ("": none)."""

    letter: str
    text: str = ""


def choice_agreement(prediction: str, answer: str, is_same_text: Callable[[str, str], bool]) -> bool | None:
    """Return whether two answers name the same choice's letter, and the same text if both have a text.

    The gold choice's text alone is right too. None: the prediction is neither a letter nor this text, or the gold
    answer is no choice.
    """
    gold, choice = read_choice(plain_text(answer)), read_choice(plain_text(prediction))
    if gold is not None and gold.text and choice is None and is_same_text(prediction, gold.text):
        return True
    if gold is None or choice is None:
        return None
    is_same = gold.letter == choice.letter
    return is_same and is_same_text(choice.text, gold.text) if gold.text and choice.text else is_same


def read_choice(text: str) -> NamedChoice | None:
    """Return the choice that a text names. None: no letter, or several.

    The letter stands alone, in brackets, or before a mark and the choice's text.
    """
    text = _BRACKETED.sub(lambda match: f"({match[1] or match[2]})", _LABEL.sub("", text))
    alone = _ALONE.fullmatch(text)
    if alone:
        return NamedChoice(alone[1] or alone[2])
    match = _WITH_TEXT.fullmatch(text)
    return None if match is None or is_hedged(match[3]) else NamedChoice(match[1] or match[2], match[3])


def is_hedged(text: str) -> bool:
    """Return whether the text after a choice's letter names another choice, or withdraws the first."""
    return _HEDGE.search(text) is not None
