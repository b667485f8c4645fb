"""Mathematical equivalence of a predicted and a gold answer.

math-verify's own timeouts are disabled: they are alarms of the main thread that some answers ignore. The caps below
refuse answers that are known to take for ever; others that hang must be killed by the caller.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef

from megarl.rewards.quantities import read_quantity, same_quantity, split_unit

MAX_ANSWER_CHARACTERS = 1000
MAX_NESTING = 10
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 10_000

_EXTRACTION = (
    ExprExtractionConfig(),
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="all"
        ),
    ),
)
_EXPONENT = re.compile(r"(?:\^|\*\*)[\s{(+-]*(\d+)")
_POWER_TOWER = re.compile(r"(?:\^|\*\*)[\s{(+-]*\d+\s*(?:\^|\*\*)[\s{(+-]*\d")
_FACTORIAL = re.compile(r"(\d+)[\s})]*!|\\[dt]?binom\s*\{?\s*(\d+)")
_NESTED_FACTORIAL = re.compile(r"!\s*(?:\\right)?[\s})\]]*!")
_BOX = r"\boxed{"
_WRITTEN_OTHERWISE = {
    "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ",
    "÷": "/", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "\u222a": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "²": "^2", "³": "^3", r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\varnothing": r"\emptyset",
    r"\left": "", r"\right": "", r"\displaystyle": "", r"\leqslant": r"\le ", r"\geqslant": r"\ge ",
    "\u00a0": " ", "\u202f": " ", "\u2009": " ", r"\;": " ", r"\:": " ", r"\quad": " ",
    r"\begin{bmatrix}": r"\begin{pmatrix}", r"\end{bmatrix}": r"\end{pmatrix}",
}  # fmt: skip
"""Unicode characters and LaTeX spellings, each with its normalised spelling."""
_SPELLING = re.compile(
    "|".join(
        re.escape(sign) + ("(?![A-Za-z])" if sign[-1].isalpha() and sign[0] == "\\" else "")
        for sign in _WRITTEN_OTHERWISE
    )
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_LETTERLESS_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}A-Za-z]*)\}")
_ORDINAL = re.compile(r"(?<=\d)\s*\^\s*\{?\s*\\?(?:text|mathrm)?\s*\{?\s*(st|nd|rd|th)\s*\}?\s*\}?")
_IN_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?(?:\\text\s*\{)?([0-9a-z]+)\}*")
_CHOICE = re.compile(r"\(?([A-Z])\)")
_NOT_READ = re.compile(r"(?<!_)\d\s+\d|\d'")
"""Numbers side by side, which math-verify adds or multiplies, and feet, which it overlooks."""
_NAMED = re.compile(r"(?<![A-Za-z\\])(pi)(?![A-Za-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_FUNCTIONS = set(
    """
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt max min gcd lcm mod det
    pi infinity inf oo
    """.split()  # noqa: SIM905
)
"""Words that are mathematical functions or constants."""
_CONNECTIVES = {"or", "and"}
_PRODUCT = re.compile(r"[xyz]{2,3}|[a-c][x-z]|[x-z][a-c]")
"""Adjacent letters that are a product, in an answer of letters only; others are a word."""
_EXACT_DIGITS = 50

for _logger_name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_logger_name).disabled = True  # else every process warns that time-outs are off


def agreement(prediction: str, answer: str) -> float:
    """1 if `prediction` equals `answer`; 0.5 if it does but cannot be parsed while the answer can; else 0.

    Both are LaTeX or plain text, with or without an enclosing \\boxed{}. In turn: equal texts agree; plain numbers and
    quantities are compared exactly (`quantities`); words are compared as words; all else is parsed and compared by
    math-verify, with decimals as exact fractions. Where one of the two cannot be parsed, or is beyond the caps, they
    agree if they are the same but for spaces and braces. An empty prediction never agrees.
    Source: ColossalRL's rewards.
    """
    prediction, answer = _normalized(prediction), _normalized(answer)
    if not prediction:
        return 0.0
    if _without_spaces(prediction) == _without_spaces(answer):
        return 1.0 if prediction == answer or _is_readable(prediction) or not _is_readable(answer) else 0.5
    predicted_base, gold_base = _IN_BASE.fullmatch(prediction), _IN_BASE.fullmatch(answer)
    if predicted_base:
        return float(bool(gold_base) and gold_base.groups() == predicted_base.groups())
    if gold_base:
        return float(prediction == gold_base[1])
    predicted_quantity, gold_quantity = read_quantity(prediction), read_quantity(answer)
    if predicted_quantity and gold_quantity:
        return float(same_quantity(predicted_quantity, gold_quantity))
    if _is_words(prediction) or _is_words(answer):
        return float(_words(prediction) == _words(answer))
    predicted_text, predicted_unit = split_unit(prediction)
    gold_text, gold_unit = split_unit(answer)
    scale = Fraction(1)
    if gold_unit and predicted_unit:
        if gold_unit.dimensions != predicted_unit.dimensions:
            return 0.0
        scale = predicted_unit.factor / gold_unit.factor
    words = _long_words(gold_text)
    if _long_words(predicted_text) != words:
        return 0.0
    if words and _caseless(prediction) == _caseless(answer):
        return 1.0
    return float(_is_same_expression(gold_text, predicted_text, scale))


def is_within_caps(text: str) -> bool:
    """Whether a text's length, nesting, powers, factorials and binomials are small enough for the parser."""
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


def _normalized(text: str) -> str:
    """The text in normalised spelling, without an enclosing box, dollar signs or a final full stop."""
    text = text.strip()
    if text.startswith(_BOX) and text.endswith("}") and text.count(_BOX) == 1:
        text = text[len(_BOX) : -1].strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            text = inner.strip() if "$" not in inner else text
    text = _SPELLING.sub(lambda sign: _WRITTEN_OTHERWISE[sign[0]], text).strip()
    text = _LETTERLESS_TEXT.sub(r"\1", text)
    text = _ORDINAL.sub(r"\1", text)
    text = _NAMED.sub(r"\\\1 ", text)
    without_stop = re.sub(r"[.,;]+$", "", text).strip()
    text = text if text.endswith("...") or not without_stop else without_stop
    choice = _CHOICE.fullmatch(text)
    return choice[1] if choice else text


def _without_spaces(text: str) -> str:
    """The text without braces, and without spaces but those between letters or digits."""
    text = re.sub(r"[{}]", "", re.sub(r"(?<=[\w}])\s+(?=[\w{])", "\0", text))
    return re.sub(r"\s+", "", text)


def _plain_text(text: str) -> str:
    """The text with its \\text{...} unwrapped."""
    return " ".join(_TEXT.sub(r" \1 ", text).split())


def _caseless(text: str) -> str:
    return _without_spaces(_plain_text(text)).lower()


def _is_words(text: str) -> bool:
    """Whether the text is words, or letters of a multiple choice, without mathematics."""
    plain = _plain_text(text).strip("()[]{}\"'` ")
    if not re.fullmatch(r"[A-Za-z][A-Za-z\s,.'-]*", plain):
        return False
    words = [word for word in re.findall(r"[A-Za-z]+", plain) if word.lower() not in _FUNCTIONS | _CONNECTIVES]
    if len(words) == 1:
        return "\\text" in text or (len(words[0]) > 1 and not _PRODUCT.fullmatch(words[0]))
    return any(len(word) > 1 and not _PRODUCT.fullmatch(word) for word in words)


def _words(text: str) -> list[str]:
    """The words of a text for comparison, in lower case but for single letters."""
    words = re.findall(r"[A-Za-z0-9]+|[^\sA-Za-z0-9]", _plain_text(text))
    kept = [word for word in words if word not in "()[]{}\"'`.,'-"]
    return [word.lower() if len(word) > 1 else word for word in kept]


def _long_words(text: str) -> list[str]:
    """Runs of letters in a formula that are no product of variables, such as "listen" and "AB", in order."""
    found = _WORD.findall(_COMMAND.sub(" ", _plain_text(text)))
    words = (word for word in found if word.lower() not in _FUNCTIONS | _CONNECTIVES)
    return [word.lower() for word in words if len(word) > 3 or not word.islower()]


def _is_same_expression(gold_text: str, predicted_text: str, scale: Fraction) -> bool:
    """Whether two formulas are equal, the prediction multiplied by `scale`."""
    gold, predicted = _expressions(gold_text), _expressions(predicted_text)
    if not gold or not predicted:
        return False
    if scale != 1:
        factor = sympy.Rational(scale.numerator, scale.denominator)
        predicted = [factor * expression for expression in predicted if isinstance(expression, sympy.Expr)]
    return any(_is_equal(g, p) for g in gold for p in predicted)


def _is_equal(gold: Any, predicted: Any) -> bool:
    if not isinstance(gold, sympy.Eq | sympy.And) and not _names_its_value(predicted):
        return False
    if not verify(gold, predicted, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    # math-verify takes numbers below 1e-15 for zero, and rounds.
    both = [_number(gold), _number(predicted)]
    if any(number is None for number in both):
        return True
    one, other = both
    return bool(abs(one - other) <= abs(one) * sympy.Float(10) ** (10 - _EXACT_DIGITS))


def _names_its_value(predicted: Any) -> bool:
    """Whether a prediction is an answer: an equation must assign a variable or hold, else its right side is none."""
    if isinstance(predicted, sympy.FiniteSet):
        return all(_names_its_value(each) for each in predicted.args)
    if isinstance(predicted, sympy.And):
        parts = [each for each in predicted.args if isinstance(each, sympy.Eq)]
        return not parts or any(_names_its_value(each) for each in parts)
    if not isinstance(predicted, sympy.Eq) or isinstance(predicted.lhs, sympy.Symbol | AppliedUndef):
        return True
    left, right = predicted.args
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return False
    return bool(sympy.simplify(left - right) == 0)


def _number(expression: Any) -> Any:
    """A formula's value in 50 digits; None for one with variables or without a numeric value."""
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    value = expression.doit().evalf(_EXACT_DIGITS)
    return value if value.is_number and value.is_finite else None


def _is_readable(text: str) -> bool:
    return bool(read_quantity(text) or _expressions(text))


def _expressions(text: str) -> list[Any]:
    """The expressions that math-verify parses, without its fallback to raw text; decimals as exact fractions."""
    text = re.sub(r"(\\frac)\s*(\d)\s+(\d)", r"\1{\2}{\3}", text)
    if not is_within_caps(text) or _NOT_READ.search(text):
        return []
    # It declares no None, which turns its timeout off.
    parsed = parse(f"\\boxed{{{text}}}", _EXTRACTION, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    found = [_exact(expression) for expression in parsed if not isinstance(expression, str)]
    return [_union(expression) for expression in found] if re.search(r"\bor\b", text) else found


def _union(expression: Any) -> Any:
    """The set of numbers of `x<1 or x>2`, which math-verify parses as a set of inequalities."""
    inequalities = sympy.Ne | sympy.Lt | sympy.Le | sympy.Gt | sympy.Ge
    parts: tuple[Any, ...] = expression.args if isinstance(expression, sympy.FiniteSet) else ()
    if not parts or not all(isinstance(part, inequalities) for part in parts):
        return expression
    with suppress(NotImplementedError, ValueError):  # of several variables, or of a kind that sympy does not solve
        return sympy.Union(*(part.as_set() for part in parts))
    return expression


def _exact(expression: Any) -> Any:
    decimals = expression.atoms(sympy.Float)
    return expression.xreplace({number: sympy.Rational(str(number)) for number in decimals}) if decimals else expression
