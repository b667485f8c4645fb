"""Numeric value of a formula in 50 digits, for chosen values of its variables."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
from mpmath.libmp import libmpf

from megarl.rewards.formulas.exact import MAX_BITS, NoValueError, exact
from megarl.rewards.formulas.nodes import Node

DIGITS = 50
_TOLERANCE = mpmath.mpf(10) ** -40
"""Tolerance for equality, relative to the values and to cancelled terms. It leaves 10 of 50 digits for rounding
errors.
"""
MAX_MAGNITUDE = 400
"""Maximum binary exponent of arguments to functions and powers, because the digits needed grow with it."""
# Gamma of larger numbers would take too long.
MAX_GAMMA = 1 << 24

# A clone: changing the precision must not affect other users of mpmath in this process.
_context = mpmath.mp.clone()
_context.dps = DIGITS
_DEGREE = _context.pi / 180
_I = _context.mpc(0, 1)
_KINDS_OF_POINTS = ("positive", "large", "mixed", "mixed")


class Evaluation:
    """Numeric evaluation of formulas, for one choice of values of their variables.

    `scale` is the largest summand so far. A difference small against it counts as a rounding error.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self._kind = kind
        self._seed = seed
        self.scale = _context.mpf(0)

    def value(self, node: Node) -> Any:
        """Return the numeric value of a formula. Raises NoValueError if it has none."""
        try:
            # mpmath raises all of these outside a function's domain, or for too large numbers.
            found = self._value(node)
        except (
            ZeroDivisionError,
            ValueError,
            OverflowError,
            TypeError,
            NotImplementedError,
            MemoryError,
            libmpf.ComplexResult,
        ):
            raise NoValueError from None
        if not _context.isfinite(found):
            raise NoValueError
        return found

    def _value(self, node: Node) -> Any:
        kind = node.kind
        if kind == "number":
            return _context.mpf(node.value.numerator) / node.value.denominator
        if kind in ("symbol", "constant"):
            return self._symbol(node)
        parts = [self._value(part) for part in node.parts]
        if kind == "sum":
            self.scale = max(self.scale, *(abs(part) for part in parts))
            return sum(parts[1:], parts[0])
        if kind == "product":
            found = parts[0]
            for part in parts[1:]:
                found = found * part
            return found
        if kind == "quotient":
            return parts[0] / parts[1]
        if kind == "negative":
            return -parts[0]
        if kind == "power":
            return _power(*parts)
        if kind == "call":
            return _call(node.value, parts)
        if kind in ("apply", "index"):
            return self._unknown_function(f"{kind} {node.value} {len(parts)}", parts)
        raise NoValueError

    def _symbol(self, node: Node) -> Any:
        if node.kind == "constant":
            if node.value == "pi":
                return +_context.pi
            if node.value == "e":
                return +_context.e
            if node.value == "i":
                return _I
            if node.value == "degree":
                return _DEGREE
            raise NoValueError
        return _point(node.value, self._kind, self._seed)

    def _unknown_function(self, name: str, parts: list[Any]) -> Any:
        """Return the value of an unknown function f(x): a smooth function of all arguments, different for every name.

        Two formulas with the same unknown function can thus be compared.
        """
        found = _point(name, "positive", 0)
        for place, part in enumerate(parts):
            # Sines of large arguments lose digits.
            if _context.mag(part) > 20:
                raise NoValueError
            shift = _point(f"{name} {place}", "positive", 0)
            found = found + _context.sin(part * shift + found) + part * shift
        return found


@lru_cache(maxsize=4096)
def _point(name: str, kind: str, seed: int) -> Any:
    # Seeded by name: a symbol has the same value in both formulas and in every process.
    generator = random.Random(f"{name} {kind} {seed}")
    size = generator.uniform(0.3, 3.0) if kind != "large" else generator.uniform(3.0, 30.0)
    # Negative values find differences such as x and |x|; positive ones keep roots and logarithms real.
    sign = -1 if kind == "mixed" and generator.random() < 0.7 else 1
    return sign * _context.mpf(size) + _context.mpf(generator.getrandbits(100)) / (1 << 140)


def _is_real(value: Any) -> bool:
    return not isinstance(value, _context.mpc) or abs(value.imag) <= _TOLERANCE * (1 + abs(value))


def _limited(value: Any) -> Any:
    if value != 0 and _context.mag(value) > MAX_MAGNITUDE:
        raise NoValueError
    return value


def _power(base: Any, exponent: Any) -> Any:
    _limited(exponent)
    if base == 0:
        if not _is_real(exponent) or _context.re(exponent) <= 0:
            raise NoValueError
        return _context.mpf(0)
    # mpmath needs more digits, as many as the result has before its point.
    if abs(_context.mag(base) * exponent) > 1 << 20 or abs(exponent) > 1 << 40:
        raise NoValueError
    return _context.power(base, exponent)


def _root(radicand: Any, degree: Any) -> Any:
    if degree == 2:
        return _context.sqrt(radicand)
    # An odd root of a negative number is real, while mpmath would take the complex principal value.
    if _is_real(radicand) and _context.re(radicand) < 0 and degree == int(_context.re(degree)) and int(degree) % 2:
        return -_context.power(-_context.re(radicand), 1 / degree)
    return _power(radicand, 1 / degree)


def _log(operand: Any, base: Any) -> Any:
    if operand == 0:
        raise NoValueError
    return _context.log(operand) / _context.log(base)


def _gamma_of(operand: Any) -> Any:
    if abs(operand) > MAX_GAMMA:
        raise NoValueError
    return _context.gamma(operand + 1)


def _binomial(over: Any, under: Any) -> Any:
    if max(abs(over), abs(under)) > MAX_GAMMA:
        raise NoValueError
    return _context.binomial(over, under)


def _double_factorial(operand: Any) -> Any:
    if abs(operand) > MAX_GAMMA:
        raise NoValueError
    return _context.fac2(operand)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "root": _root,
    "log": _log,
    "abs": abs,
    "floor": _context.floor,
    "ceiling": _context.ceil,
    "factorial": _gamma_of,
    "double_factorial": _double_factorial,
    "binomial": _binomial,
    "arcsin": _context.asin, "arccos": _context.acos, "arctan": _context.atan, "arccot": _context.acot,
    "arcsec": _context.asec, "arccsc": _context.acsc,
} | {
    name: getattr(_context, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth")
}  # fmt: skip


def _call(name: str, parts: list[Any]) -> Any:
    function = _FUNCTIONS.get(name)
    if function is None:
        raise NoValueError
    if name not in ("abs", "root", "log"):
        for part in parts:
            _limited(part)
            # Functions of large numbers need more digits.
            if name.endswith("h") and abs(part) > 1000:
                raise NoValueError
    return function(*parts)


def same_value(one: Node, other: Node, factor: Fraction = Fraction(1)) -> bool:
    """Return whether `one` and `other * factor` have the same value for all values of their variables.

    Rational numbers are compared exactly. Others are compared in 40 digits at four points: two positive, two of any
    sign. Points of any sign are skipped if both values are complex, or if one does not exist. A point with one complex
    value is skipped if a formula has logarithms, or roots other than square roots.
    """
    first, second = exact(one), exact(other)
    if first is not None and second is not None:
        return first == second * factor
    # An exact number with more digits than are computed equals only exact numbers.
    has_symbols = bool(one.symbols() | other.symbols())
    if not has_symbols and any(_is_longer(each) for each in (first, second)):
        return False
    compared = 0
    for seed, kind in enumerate(_KINDS_OF_POINTS if has_symbols else ("positive",)):
        verdict = _same_at(one, other, factor, kind, seed)
        if verdict is False:
            return False
        compared += verdict is True
    return compared >= (2 if has_symbols else 1)


def _is_longer(number: Fraction | None) -> bool:
    return number is not None and max(number.numerator, number.denominator).bit_length() > 130


def _same_at(one: Node, other: Node, factor: Fraction, kind: str, seed: int) -> bool | None:
    """Return whether two formulas have equal values at one point. None: they cannot be compared there."""
    evaluation = Evaluation(kind, seed)
    try:
        first = evaluation.value(one)
    except NoValueError:
        first = None
    try:
        second = evaluation.value(other) * factor.numerator / factor.denominator
    except NoValueError:
        second = None
    if first is None or second is None:
        # At positive points a formula without a value differs from one with a value.
        return None if kind == "mixed" or first is second else False
    if is_close(first, second, evaluation.scale):
        return True
    # Roots and logarithms of negative numbers have several complex branches, so a difference proves nothing.
    complex_values = 2 - _is_real(first) - _is_real(second)
    is_open = complex_values == 2 or (complex_values == 1 and (_has_branches(one) or _has_branches(other)))
    return None if kind == "mixed" and is_open else False


def _has_branches(formula: Node) -> bool:
    r"""Return whether a formula has logarithms or odd roots: equal forms of it may then differ in being real or
    complex.

    An example is `\ln x^2` and `2\ln x` for negative x.
    """
    return any(_is_of_several_branches(node) for node in formula.walk())


def _is_of_several_branches(node: Node) -> bool:
    if node.kind == "call" and node.value == "root":
        return exact(node.parts[1]) != 2
    if node.kind == "power" and node.parts[0].symbols():
        exponent = exact(node.parts[1])
        return exponent is None or exponent.denominator > 2
    return node.kind == "call" and node.value == "log"


def is_close(first: Any, second: Any, scale: Any = 0) -> bool:
    return bool(abs(first - second) <= _TOLERANCE * max(abs(first), abs(second), scale))


def real_value(node: Node, values: dict[str, Any] | None = None) -> Any:
    """Return a formula's real value, with its variables replaced by `values`.

    Raises NoValueError if a variable has no value, or if the result is not real.
    """
    if values:
        node = _with_values(node, values)
    if node.symbols():
        raise NoValueError
    value = Evaluation("positive", 0).value(node)
    if not _is_real(value):
        raise NoValueError
    return _context.re(value)


def _with_values(node: Node, values: dict[str, Fraction]) -> Node:
    if node.kind == "symbol" and node.value in values:
        return Node("number", (), values[node.value])
    return Node(node.kind, tuple(_with_values(part, values) for part in node.parts), node.value) if node.parts else node


def is_within_percent(one: Node, other: Node) -> bool:
    """Return whether two formulas without variables have real values differing by 1 % at most."""
    try:
        first, second = real_value(one), real_value(other)
    except NoValueError:
        return False
    return bool(abs(first - second) <= abs(first) / 100)


def as_fraction(value: Any) -> Fraction:
    """Return a floating-point number as an exact fraction. Raises NoValueError if it is too large."""
    sign, mantissa, exponent, _ = _context.mpf(value)._mpf_
    if abs(exponent) > MAX_BITS:
        raise NoValueError
    return (-1 if sign else 1) * Fraction(int(mantissa)) * Fraction(2) ** exponent


def is_proportional(one: Node, other: Node) -> int:
    """Return 1 or -1 if `one` equals `other` times a positive or a negative constant; 0: it does not."""
    ratios: list[Any] = []
    for seed, kind in enumerate(_KINDS_OF_POINTS):
        evaluation = Evaluation(kind, seed)
        try:
            first, second = evaluation.value(one), evaluation.value(other)
        except NoValueError:
            continue
        # A value that cancelled to almost zero has no reliable ratio.
        if min(abs(first), abs(second)) <= _TOLERANCE * evaluation.scale or second == 0 or first == 0:
            return 0
        ratios.append(first / second)
    if len(ratios) < 2 or not _is_real(ratios[0]) or not all(is_close(ratios[0], ratio) for ratio in ratios):
        return 0
    return 1 if _context.re(ratios[0]) > 0 else -1
