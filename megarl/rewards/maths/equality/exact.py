"""Exact value of a formula made of rational numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

from megarl.rewards.maths.formulas.nodes import Node, number, replace_node, symbol

MAX_BITS = 20_000
"""Maximum bits of an exact number. Below, operations take microseconds."""


MAX_SERIES_SIZE = 10_000
"""Maximum number of terms of a sum or product, times the nodes of a term."""
_SIZE_OF_SERIES = 100


class NoValueError(ArithmeticError):
    """Raised if a formula has no value, or a value beyond the limits of size."""


def exact(node: Node) -> Fraction | None:
    """Return the exact value of a formula of rational numbers. None: another formula, or a value beyond the limits."""
    try:
        return _exact(node)
    except (NoValueError, ZeroDivisionError, OverflowError):
        return None


def _exact(node: Node) -> Fraction:
    """Return the exact value of a formula. Raises NoValueError if a part is not rational, or is too large."""
    if node.kind == "number":
        return node.value
    if node.kind == "numeral":
        return node.parts[0].value
    if node.kind == "series":
        return _exact_series(node)
    # A degree is pi/180, not rational.
    if node.kind == "constant" and node.value == "degree":
        raise NoValueError
    parts = [_exact(part) for part in node.parts]
    if node.kind == "sum":
        value = sum(parts, Fraction(0))
    elif node.kind == "product":
        value = Fraction(1)
        for part in parts:
            # Check each step: the product of many factors could grow beyond all limits.
            value = _check_size(value * part)
    elif node.kind == "quotient":
        value = parts[0] / parts[1]
    elif node.kind == "negative":
        value = -parts[0]
    elif node.kind == "power":
        value = _exact_power(*parts)
    elif node.kind == "call" and node.value in _EXACT_FUNCTIONS:
        value = _EXACT_FUNCTIONS[node.value](*parts)
    else:
        raise NoValueError
    return _check_size(value)


def _exact_series(node: Node) -> Fraction:
    low, high = _exact(node.parts[1]), _exact(node.parts[2])
    value = Fraction(0 if node.value[0] == "sum" else 1)
    for term in series_terms(node, low, high):
        value = _check_size(value + _exact(term) if node.value[0] == "sum" else value * _exact(term))
    return value


def series_terms(node: Node, low: Fraction, high: Fraction) -> Iterator[Node]:
    """Yield the terms of a sum or product from index `low` to `high`. Raises NoValueError beyond the limits."""
    body, index = node.parts[0], symbol(node.value[1])
    if low.denominator != 1 or high.denominator != 1:
        raise NoValueError
    body_size = sum(_SIZE_OF_SERIES if part.kind == "series" else 1 for part in body.walk())
    if (high - low + 1) * body_size > MAX_SERIES_SIZE:
        raise NoValueError
    for index_value in range(int(low), int(high) + 1):
        yield replace_node(body, index, number(index_value))


def _check_size(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NoValueError
    return value


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise NoValueError
    # Estimate the size before computing. Powers of 1 and -1 never grow.
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - (abs(base) == 1)
    if bits * abs(exponent) > MAX_BITS:
        raise NoValueError
    return base ** int(exponent)


def _exact_factorial(operand: Fraction, step: int = 1) -> Fraction:
    if operand.denominator != 1 or not 0 <= operand <= 1000:
        raise NoValueError
    return Fraction(math.prod(range(int(operand), 1, -step)))


def _exact_binomial(n: Fraction, k: Fraction) -> Fraction:
    if n.denominator != 1 or k.denominator != 1 or not 0 <= n <= 5000 or k < 0:
        raise NoValueError
    if k > n:
        return Fraction(0)
    product = Fraction(1)
    # C(n, k) equals C(n, n - k). The smaller number takes fewer steps.
    for step in range(int(min(k, n - k))):
        product = product * (int(n) - step) / (step + 1)
    return product


def _exact_root(radicand: Fraction, degree: Fraction) -> Fraction:
    if degree.denominator != 1 or not 2 <= degree <= 64 or radicand < 0:
        raise NoValueError
    numerator, denominator = (
        _whole_root(radicand.numerator, int(degree)),
        _whole_root(radicand.denominator, int(degree)),
    )
    return Fraction(numerator, denominator)


def _whole_root(radicand: int, degree: int) -> int:
    # Bisection with integers, because floats are not exact.
    low, high = 0, 1 << (radicand.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**degree < radicand else (low, middle)
    if low**degree != radicand:
        raise NoValueError
    return low


def _as_whole_numbers(operands: tuple[Fraction, ...]) -> list[int]:
    if any(operand.denominator != 1 for operand in operands):
        raise NoValueError
    return [int(operand) for operand in operands]


_EXACT_FUNCTIONS: dict[str, Callable[..., Fraction]] = {
    "abs": lambda operand: abs(operand),
    "floor": lambda operand: Fraction(operand.__floor__()),
    "ceiling": lambda operand: Fraction(operand.__ceil__()),
    "factorial": _exact_factorial,
    "double_factorial": lambda operand: _exact_factorial(operand, step=2),
    "binomial": _exact_binomial,
    "root": _exact_root,
    "mod": lambda operand, modulus: operand % modulus,
    "max": lambda *operands: max(operands),
    "min": lambda *operands: min(operands),
    "gcd": lambda *operands: Fraction(math.gcd(*_as_whole_numbers(operands))),
    "lcm": lambda *operands: Fraction(math.lcm(*_as_whole_numbers(operands))),
}
