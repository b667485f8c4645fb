"""Answers naming the letter of a choice, optionally with its text: `(C) 12`, `C. 12`, `\\textbf{(C)}`."""

from __future__ import annotations

import re

from megarl.rewards.formulas.spelling import plain_text

_LABEL = re.compile(
    r"^(?i:(?:the\s+)?(?:(?:correct|final)\s+)?(?:option|choice|answer)(?:\s+is\b)?)\s*:?\s*(?=\(?[A-Z]\b)"
)
_ALONE = re.compile(r"(?:\(\s*([A-Z])\s*\)|([A-Z])\s*\)?)[.:]?")
_WITH_TEXT = re.compile(r"(?:\(\s*([A-Z])\s*\)|([A-Z])\s*[).:])(?:\s|\\,|\\ |~)*(\S.*)", re.DOTALL)
_HEDGE = re.compile(
    r"^\W*(?:and|or|not)\b|^\s*[,;/&+]|\b(?:and|or|not|nor|maybe|perhaps)\b.*\b[A-Z]\b|\(\s*[A-Z]\s*\)"
    r"|(?:^|[\s,])[A-Z]\s*[).:](?:\s|$)|^\W*[A-Z]\W*$"
)
"""Text naming a second choice after the first."""


def choice_agreement(prediction: str, answer: str) -> bool | None:
    """Return whether two answers name the same letter.

    None: one is not a letter, or both are plain letters without text or brackets.
    """
    gold, predicted = plain_text(answer), plain_text(prediction)
    letter, found = choice_letter(gold), choice_letter(predicted)
    if letter is None or found is None:
        return None
    return letter == found


def choice_letter(text: str) -> str | None:
    """Return the letter of a text: alone, in brackets, or before a full stop and one choice's text."""
    text = _LABEL.sub("", text)
    alone = _ALONE.fullmatch(text)
    if alone:
        return alone[1] or alone[2]
    led = _WITH_TEXT.fullmatch(text)
    return None if led is None or is_hedged(led[3]) else led[1] or led[2]


def is_hedged(text: str) -> bool:
    """Return whether the text after a letter names another choice, or takes the letter back."""
    return _HEDGE.search(text) is not None
