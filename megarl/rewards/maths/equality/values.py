"""Comparison of two formulas by their numeric values at chosen points."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from megarl.rewards.maths.equality.evaluation import Evaluation
from megarl.rewards.maths.equality.exact import NoValueError, exact
from megarl.rewards.maths.equality.precision import (
    CONTEXT,
    DIGITS,
    MAX_DIGITS,
    as_fraction,
    count_digits,
    is_close,
    is_real,
    tolerance,
    with_digits,
)
from megarl.rewards.maths.formulas.nodes import Node

_KINDS_OF_POINTS = ("positive", "large", "mixed", "mixed")
_OF_WHOLE_NUMBERS = frozenset(("gcd", "lcm", "double_factorial"))
_ROUNDING = frozenset(("floor", "ceiling", "mod")) | _OF_WHOLE_NUMBERS
_FOLDING = frozenset(("abs", "max", "min"))
_POINTS_OF_ANY_SIZE = tuple(f"mixed {place}" for place in range(24))
"""Points for formulas with cases: |x^2-1| is x^2-1 or 1-x^2. Each point has another choice of signs and sizes."""
_HALVES = tuple(f"half {place}" for place in range(1, 17))
"""Points where rounded values jump: whole numbers and the halves between them."""
NAMES_OF_WHOLE_NUMBERS = frozenset("ijklmn")


def same_value(gold: Node, prediction: Node, factor: Fraction = Fraction(1)) -> bool:
    """Return whether `gold` and `prediction * factor` have the same value for all values of their variables.

    Rational numbers are compared exactly. All else is compared in 40 digits at four points: two positive, two of any
    sign. Points of any sign are skipped if both values are complex, or if one does not exist. A point with one complex
    value is skipped if a formula has logarithms, or roots other than square roots. Formulas that round are also
    compared at whole numbers and halves, formulas with absolute values or maxima at more points of any sign. If a sum
    has terms of very different sizes, more digits are compared.
    """
    first, second = exact(gold), exact(prediction)
    if first is not None and second is not None:
        return first == second * factor
    # An exact number with more digits than the computation has can only equal an exact number.
    has_symbols = bool(gold.symbols() | prediction.symbols())
    if not has_symbols and any(_is_longer(value) for value in (first, second)):
        return False
    is_equal, bits = _compare_at_points(gold, prediction, factor, has_symbols=has_symbols)
    digits = count_digits(bits)
    if not is_equal or digits == DIGITS:
        return is_equal
    with with_digits(digits):
        return digits <= MAX_DIGITS and _compare_at_points(gold, prediction, factor, has_symbols=has_symbols)[0]


def _compare_at_points(gold: Node, prediction: Node, factor: Fraction, *, has_symbols: bool) -> tuple[bool, int]:
    """Return whether two formulas are equal at all points, and the largest distance of magnitudes in bits."""
    kinds = _choose_points(gold, prediction) if has_symbols else ("positive",)
    whole_names: frozenset[str] = frozenset()
    if has_symbols and any(map(_is_stepwise, (*gold.walk(), *prediction.walk()))):
        whole_names = _find_whole_names(gold) | _find_whole_names(prediction)
        kinds = (*kinds, *_HALVES)
    num_equal = bits = 0
    for seed, kind in enumerate(kinds):
        verdict, point_bits = _compare_at(gold, prediction, factor, kind, seed, whole_names)
        if verdict is False:
            return False, 0
        num_equal += verdict is True
        bits = max(bits, point_bits)
    return num_equal >= (2 if has_symbols else 1), bits


def _choose_points(gold: Node, prediction: Node) -> tuple[str, ...]:
    has_cases = any(map(_is_folded, (*gold.walk(), *prediction.walk())))
    return (*_KINDS_OF_POINTS, *_POINTS_OF_ANY_SIZE) if has_cases else _KINDS_OF_POINTS


def _is_folded(node: Node) -> bool:
    r"""Return whether a formula has cases by sign or size, like an absolute value, a maximum, or `\sqrt{x^2}`."""
    if node.kind != "call" or not node.symbols():
        return False
    if node.value in _FOLDING:
        return True
    # Other roots are left out: \sqrt{xy} equals \sqrt x\sqrt y for positive letters only, and is often so meant.
    radicand = node.parts[0]
    return node.value == "root" and radicand.kind == "power" and exact(radicand.parts[1]) == exact(node.parts[1])


def _is_stepwise(node: Node) -> bool:
    """Return whether a formula rounds, or has a variable number of terms."""
    return node.kind == "series" or (node.kind == "call" and node.value in _ROUNDING)


def _find_whole_names(formula: Node) -> frozenset[str]:
    """Return the variables that are whole numbers, by their usual letters or because they count terms."""
    names: set[str] = set()
    for node in formula.walk():
        if node.kind == "series":
            names |= node.parts[1].symbols() | node.parts[2].symbols()
        elif node.kind == "call" and node.value in _OF_WHOLE_NUMBERS:
            names |= node.symbols()
        elif node.kind == "symbol" and node.value in NAMES_OF_WHOLE_NUMBERS:
            names.add(node.value)
    return frozenset(names)


def _is_longer(number: Fraction | None) -> bool:
    return number is not None and max(number.numerator, number.denominator).bit_length() > 130


def _compare_at(
    gold: Node, prediction: Node, factor: Fraction, kind: str, seed: int, whole_names: frozenset[str]
) -> tuple[bool | None, int]:
    """Return whether two formulas are equal at one random point, and the bits that cancellation may have lost.

    None: the point proves nothing. The bits are 0 unless the formulas are equal. `kind` and `seed` choose the point, as
    in `Evaluation`. `factor`: the prediction is multiplied by it, for another unit.
    """
    evaluation = Evaluation(kind, seed, whole_names)
    try:
        gold_value = evaluation.value(gold)
    except NoValueError:
        gold_value = None
    try:
        predicted_value = evaluation.value(prediction) * factor.numerator / factor.denominator
    except NoValueError:
        predicted_value = None
    if gold_value is None or predicted_value is None:
        # At positive points a formula without a value differs from one with a value.
        return (None if kind.startswith("mixed") or gold_value is predicted_value else False), 0
    if is_close(gold_value, predicted_value, evaluation.scale):
        return True, max(
            evaluation.bits, _count_cancelled_bits(evaluation.scale, max(abs(gold_value), abs(predicted_value)))
        )
    # Roots and logarithms of negative numbers have several complex branches, so a difference proves nothing.
    complex_values = 2 - is_real(gold_value) - is_real(predicted_value)
    is_inconclusive = complex_values == 2 or (
        complex_values == 1 and (_has_branches(gold) or _has_branches(prediction))
    )
    return (None if kind.startswith("mixed") and is_inconclusive else False), 0


def _count_cancelled_bits(scale: Any, value: Any) -> int:
    """Return the bits by which a value is smaller than its formula's largest summand."""
    return CONTEXT.mag(scale) - CONTEXT.mag(value) if scale and value else 0


def _has_branches(formula: Node) -> bool:
    r"""Return whether a formula has logarithms or odd roots.

    Of two equal forms, one may then be real and the other complex: `\ln x^2` and `2\ln x` for negative x.
    """
    return any(_is_multivalued(node) for node in formula.walk())


def _is_multivalued(node: Node) -> bool:
    """Return whether a formula is a logarithm, a root or a fractional power, square roots excluded."""
    if node.kind == "call" and node.value == "root":
        return exact(node.parts[1]) != 2
    if node.kind == "power" and node.parts[0].symbols():
        exponent = exact(node.parts[1])
        return exponent is None or exponent.denominator > 2
    return node.kind == "call" and node.value == "log"


def real_value(node: Node, values: dict[str, Any] | None = None) -> Any:
    """Return a formula's real value, with its variables replaced by `values`.

    Raises NoValueError for a variable without a value, and for a result that is not real.
    """
    if values:
        node = _with_values(node, values)
    if node.symbols():
        raise NoValueError
    value = Evaluation("positive", 0).value(node)
    if not is_real(value):
        raise NoValueError
    return CONTEXT.re(value)


def _with_values(node: Node, values: dict[str, Fraction]) -> Node:
    if node.kind == "symbol" and node.value in values:
        return Node("number", (), values[node.value])
    return Node(node.kind, tuple(_with_values(part, values) for part in node.parts), node.value) if node.parts else node


def is_rounded(value: Node, rounding: Node) -> bool:
    """Return whether the real value of a formula without variables is `rounding`, up to 1 % and its last digit."""
    try:
        first, second = real_value(value), real_value(rounding)
    except NoValueError:
        return False
    last_place = _find_last_place(rounding)
    is_near = abs(first - second) <= abs(first) / 100
    return bool(is_near and (last_place is None or as_fraction(abs(first - second)) < last_place))


def _find_last_place(decimal: Node) -> Fraction | None:
    """Return the place value of the last nonzero digit: 1/100 for 0.25, 100 for 1200. None: not a decimal, or 0."""
    if decimal.kind != "number" or decimal.value == 0:
        return None
    place = Fraction(1)
    while place.denominator < 10**DIGITS and (decimal.value / place).denominator > 1:
        place /= 10
    if (decimal.value / place).denominator > 1:
        return None
    while (decimal.value / place / 10).denominator == 1:
        place *= 10
    return place


def is_proportional(formula: Node, multiple: Node) -> int:
    """Return the sign of c (1 or -1) if `formula` is c * `multiple`, else 0."""
    sign, bits = _measure_proportion(formula, multiple)
    digits = count_digits(bits)
    if not sign or digits == DIGITS:
        return sign
    with with_digits(digits):
        return _measure_proportion(formula, multiple)[0] if digits <= MAX_DIGITS else 0


def _measure_proportion(formula: Node, multiple: Node) -> tuple[int, int]:
    """Return the sign of c if `multiple` is c * `formula` (0: it is not), and the bits lost to cancellation.

    The factor is tested at random points.
    """
    ratios: list[Any] = []
    bits = 0
    for seed, kind in enumerate(_choose_points(formula, multiple)):
        evaluation = Evaluation(kind, seed)
        try:
            formula_value, multiple_value = evaluation.value(formula), evaluation.value(multiple)
        except NoValueError:
            continue
        # The ratio of a value that is almost zero by cancellation is not reliable.
        if (
            min(abs(formula_value), abs(multiple_value)) <= tolerance() * evaluation.scale
            or multiple_value == 0
            or formula_value == 0
        ):
            return 0, 0
        ratios.append(formula_value / multiple_value)
        bits = max(bits, evaluation.bits)
    if len(ratios) < 2 or not is_real(ratios[0]) or not all(is_close(ratios[0], ratio) for ratio in ratios):
        return 0, 0
    return (1 if CONTEXT.re(ratios[0]) > 0 else -1), bits
