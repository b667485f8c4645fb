"""Statements of a choice in a completion's text: `the answer is (B)`, and what withdraws or doubles them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.rewards.maths.choice_letters import ALSO_RIGHT

REASON = r"(?i:since|because|as(?!\s+well\b)|due\s+to|given)\b"
"""Matches a word that begins the reason given for a chosen option, as in `B, because ...`."""
_OPENED = r"(?:\\[(\[]|\\(?:text|textbf|mathrm|mathbf)\s*\{|[\s*_$`\"'\u201c\u2018\[{(])*+"
"""Matches signs before a letter: dollar signs, bold marks, quotes, brackets."""
_CLOSED = r"(?:\\[)\]]|[*_$`\"'\u201d\u2019\]})])*+"
"""Matches signs after a letter: dollar signs, bold marks, quotes, brackets."""
_GOES_ON = (
    r"(?:(?<=[)\]}])(?!\s*(?:[-+*/^=<>]|\(?[A-Z]\b|[\[{]\s*[A-Z]\s*[\]}]))"
    r"|(?=[ \t]*+(?:[.,:;!。]|$|[-\u2013\u2014]+\s++(?![A-Z]\b)|\((?!\s*(?i:or|and)\b|\s*[A-Z]\s*\))"
    rf"|{REASON}|(?i:which|not|by|according|rather\s+than|instead\s+of|or|and|as\s+well\s+as)\b|[/&])))"
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
    rf"|[ \t*_)]*[,;]{_NAMED}[A-Z][)*_}}\]]*(?=[ \t]*(?:[,;.!\n]|(?i:and|or)\b|{REASON}|$))"
    r"(?![^.\n]*\b(?i:wrong|incorrect|false|not|eliminated|excluded)\b)"
    r"|[ \t*_)]*\.[ \t*_]*\(?[A-Z][.)*_]*[ \t]*(?:\n|$)"
)
"""Matches a text naming a second choice after the first.

Exceptions are choices called wrong (`B; A, C are wrong`) and the word I (`B, and I think`).
"""
_SINGLE_LETTER = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z])")
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
class Statement:
    """A statement of a choice's letter. `end` is the index in `text` after the letter and its marks."""

    letter: str
    text: str
    end: int

    @property
    def following(self) -> str:
        return self.text[self.end :]

    @property
    def following_in_line(self) -> str:
        """The rest of the statement's line without marks: the choice's text, if the statement gives it."""
        return self._rest_of_line.rstrip(" \t).!*")

    @property
    def _rest_of_line(self) -> str:
        return _BEFORE_TEXT.sub("", self.following.partition("\n")[0], count=1)

    def has_second_choice(self, own_text: str) -> bool:
        """Return whether another choice is joined to the letter (`the answer is A or B`), or to the choice's own text
        after the letter (`A, red, or B`).
        """
        own_text_match = re.match(re.escape(own_text), self._rest_of_line, re.IGNORECASE) if own_text else None
        return self._names_another(self.text, self.end) or (
            own_text_match is not None and self._names_another(self._rest_of_line, own_text_match.end())
        )

    def _names_another(self, text: str, start: int) -> bool:
        second = _SECOND.match(text, start)
        return second is not None and any(letter != self.letter for letter in _SINGLE_LETTER.findall(second[0]))


def letter_called_right(line: str) -> str | None:
    """Return the letter of a line that calls a choice right, and has nothing else: `So option B is correct.`"""
    match = _CALLED_RIGHT.fullmatch(line)
    return match[1] if match else None


def last_statement(text: str, letters: str) -> Statement | None:
    """Return the last statement of one of these letters. `the answer is I think` states no choice.

    Negations, conditions and questions do not count: `I doubt that the answer is B`.
    """
    statements = (
        Statement(letter, text, match.end())
        for match in _STATED.finditer(text)
        if (letter := _letter_of(match)) in letters and _is_asserted(match)
    )
    return next(iter(deque(statements, maxlen=1)), None)


def last_stated_text(text: str) -> str | None:
    """Return the rest of the line after the last `the answer is`, except in negations, conditions and questions."""
    matches = deque((match for match in _STATED_TEXT.finditer(text) if _is_asserted(match)), maxlen=1)
    return matches[0][1] if matches else None


def withdrawal_letters(text: str) -> Iterator[str]:
    """Yield the letters named after words that withdraw a statement: A in `No, it is A`."""
    for withdrawal in _WITHDRAWAL.finditer(text):
        for mention in _MENTIONED.finditer(_EXAMINED.sub("", withdrawal[1])):
            yield mention[1]


def _is_asserted(statement: re.Match[str]) -> bool:
    before = statement.string[max(0, statement.start() - _MAX_CHARACTERS_BEFORE) : statement.start()]
    return _NOT_STATED.search(before) is None


def _letter_of(statement: re.Match[str]) -> str:
    return next(letter for letter in statement.groups() if letter is not None).upper()
