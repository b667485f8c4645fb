"""Whether a predicted answer and the gold answer are the same mathematics.

math-verify's own time-outs are switched off: they are alarms of the main thread that some answers ignore. The caps
below refuse the answers known to take for ever; what passes them and still hangs is the caller's to kill.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

MAX_ANSWER_CHARACTERS = 1000
MAX_NESTING = 10
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 10_000

_EXTRACTION = (
    ExprExtractionConfig(),
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=True, malformed_operators=True, nits=False, boxed="all"
        ),
    ),
)
_NUMBER = re.compile(r"[+-]?(\d+|[1-9]\d{0,2}(,\d{3})+)(\.\d+)?(/[1-9]\d*)?")
_EXPONENT = re.compile(r"(?:\^|\*\*)[\s{(+-]*(\d+)")
_POWER_TOWER = re.compile(r"(?:\^|\*\*)[\s{(+-]*\d+\s*(?:\^|\*\*)[\s{(+-]*\d")
_FACTORIAL = re.compile(r"(\d+)[\s})]*!|\\[dt]?binom\s*\{?\s*(\d+)")
_NESTED_FACTORIAL = re.compile(r"!\s*(?:\\right)?[\s})\]]*!")
_BOX = r"\boxed{"
_IGNORED = str.maketrans("", "", " {},")

for _logger_name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_logger_name).disabled = True  # else every process warns that time-outs are off


def agreement(prediction: str, answer: str) -> float:
    """1 if `prediction` equals `answer`, 0 if not, and half if it does but is no mathematics though the answer is.

    Both are LaTeX or plain text, with or without an enclosing \\boxed{}. Equal texts and equal plain numbers agree
    at once; other answers are parsed and compared by math-verify. Where one of the two cannot be parsed, or is beyond
    the caps, they agree if they are the same but for spaces, braces and commas. An empty prediction never agrees.
    Source: ColossalRL's rewards.
    """
    prediction, answer = _unboxed(prediction), _unboxed(answer)
    if not prediction:
        return 0.0
    if prediction == answer or (_number(prediction) is not None and _number(prediction) == _number(answer)):
        return 1.0
    gold = _expressions(answer)
    predicted = _expressions(prediction)
    if gold and predicted:
        return float(verify(gold, predicted, timeout_seconds=None))
    if prediction.translate(_IGNORED) != answer.translate(_IGNORED):
        return 0.0
    return 0.5 if gold else 1.0


def is_within_caps(text: str) -> bool:
    """Whether `text` is short, flat and small enough in its powers, factorials and binomials to be parsed."""
    if len(text) > MAX_ANSWER_CHARACTERS or _POWER_TOWER.search(text) or _NESTED_FACTORIAL.search(text):
        return False
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    factorials = (first or second for first, second in _FACTORIAL.findall(text))
    return (
        deepest <= MAX_NESTING
        and all(int(exponent) <= MAX_EXPONENT for exponent in _EXPONENT.findall(text))
        and all(int(operand) <= MAX_FACTORIAL for operand in factorials)
    )


def _unboxed(text: str) -> str:
    """The text without a box around all of it."""
    text = text.strip()
    if text.startswith(_BOX) and text.endswith("}") and text.count(_BOX) == 1:
        return text[len(_BOX) : -1].strip()
    return text


def _number(text: str) -> Fraction | None:
    if len(text) > MAX_ANSWER_CHARACTERS or not _NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.replace(",", "").partition("/")
    return Fraction(numerator) / int(denominator or 1)


def _expressions(text: str) -> list:
    """What math-verify reads in `text`, less the raw text that it falls back to."""
    if not is_within_caps(text):
        return []
    parsed = parse(f"\\boxed{{{text}}}", _EXTRACTION, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return [expression for expression in parsed if not isinstance(expression, str)]
