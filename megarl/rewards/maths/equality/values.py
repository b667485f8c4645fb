"""Numeric value of a formula in 50 digits, for chosen values of its variables."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
from mpmath.libmp import libmpf

from megarl.rewards.maths.equality.exact import MAX_BITS, NoValueError, exact, series_terms
from megarl.rewards.maths.formulas.nodes import INFINITY, Node

DIGITS = 50
MAX_DIGITS = 1000
"""Maximum digits of a value, because gamma functions take seconds with more."""
_GUARD_DIGITS = 10
"""Digits left for rounding errors. Values equal in the other ones are equal, relative to cancelled terms."""
_SAFE_BITS = 64
"""Terms of a sum may differ by this factor's bits before more digits are needed."""
MAX_MAGNITUDE = 400
"""Maximum binary exponent of arguments to functions and powers, because the digits needed grow with it."""
# Gamma of larger numbers would take too long.
MAX_GAMMA = 1 << 24

# A clone: changing the precision must not affect other users of mpmath in this process.
_context = mpmath.mp.clone()
_context.dps = DIGITS
_TOLERANCE = _context.mpf(10) ** (_GUARD_DIGITS - DIGITS)
_I = _context.mpc(0, 1)
_KINDS_OF_POINTS = ("positive", "large", "mixed", "mixed")
_ROUNDING = frozenset(("floor", "ceiling", "mod", "gcd", "lcm"))
_HALVES = tuple(f"half {place}" for place in range(1, 17))
"""Points at which rounded values jump: the whole numbers and the halves between them."""
_NAMES_OF_WHOLE_NUMBERS = frozenset("ijklmn")
_TERMS_OF_INFINITE_SERIES = 12


class Evaluation:
    """Numeric evaluation of formulas, for one choice of values of their variables.

    `scale` is the largest summand so far. A difference small against it counts as a rounding error. `bits` is the
    largest distance of two summands' magnitudes. Variables in `whole` have whole numbers as values.
    """

    def __init__(self, kind: str, seed: int, whole: frozenset[str] = frozenset()) -> None:
        self._kind = kind
        self._seed = seed
        self._whole = whole
        self.scale = _context.mpf(0)
        self.bits = 0

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
            self.bits = max(self.bits, node.value.denominator.bit_length())
            return _context.mpf(node.value.numerator) / node.value.denominator
        if kind in ("symbol", "constant"):
            return self._symbol(node)
        if kind == "series":
            return self._series(node)
        parts = [self._value(part) for part in node.parts]
        if kind == "sum":
            return self._sum(parts)
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
        if kind == "numeral":
            return parts[0]
        # A cross product changes its sign with the order of its operands.
        if kind == "cross":
            return self._unknown_function("cross", parts) - self._unknown_function("cross", parts[::-1])
        if kind in ("apply", "index"):
            return self._unknown_function(f"{kind} {node.value} {len(parts)}", parts)
        raise NoValueError

    def _sum(self, parts: list[Any]) -> Any:
        sizes = [abs(part) for part in parts if part != 0]
        if sizes:
            largest = max(sizes)
            self.scale = max(self.scale, largest)
            self.bits = max(self.bits, _context.mag(largest) - _context.mag(min(sizes)))
        return sum(parts[1:], parts[0])

    def _series(self, node: Node) -> Any:
        low = as_fraction(self._value(node.parts[1]))
        if node.parts[2] == INFINITY:
            high = low + _TERMS_OF_INFINITE_SERIES - 1
            # The first terms stand for all, so the series equals only another infinite one.
            rest = _point("infinite series", "positive", 0)
        else:
            high = as_fraction(self._value(node.parts[2]))
            rest = None
        terms = [self._value(term) for term in series_terms(node, low, high)]
        if node.value[0] == "sum":
            return self._sum([_context.mpf(0), *terms] if rest is None else [rest, *terms])
        found = _context.mpf(1) if rest is None else rest
        for term in terms:
            found = found * term
        return found

    def _symbol(self, node: Node) -> Any:
        if node.kind == "constant":
            if node.value == "pi":
                return +_context.pi
            if node.value == "e":
                return +_context.e
            if node.value == "i":
                return _I
            if node.value == "degree":
                return _context.pi / 180
            raise NoValueError
        return _point(node.value, self._kind, self._seed, is_whole=node.value in self._whole)

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
def _point(name: str, kind: str, seed: int, *, is_whole: bool = False) -> Any:
    # Seeded by name: a symbol has the same value in both formulas and in every process.
    generator = random.Random(f"{name} {kind} {seed}")
    if kind.startswith("half"):
        place = int(kind.removeprefix("half "))
        shift = generator.randrange(2)
        return _context.mpf(place + shift) if is_whole else _context.mpf(place + shift) / 2
    if is_whole:
        return _context.mpf(generator.randint(1, 12))
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


def _real_parts(parts: tuple[Any, ...]) -> list[Any]:
    if not all(_is_real(part) for part in parts):
        raise NoValueError
    return [_context.re(part) for part in parts]


def _whole_parts(parts: tuple[Any, ...]) -> list[int]:
    numbers = [as_fraction(part) for part in _real_parts(parts)]
    if any(each.denominator != 1 for each in numbers):
        raise NoValueError
    return [int(each) for each in numbers]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "root": _root,
    "log": _log,
    "abs": abs,
    "floor": _context.floor,
    "ceiling": _context.ceil,
    "factorial": _gamma_of,
    "double_factorial": _double_factorial,
    "binomial": _binomial,
    "max": lambda *parts: max(_real_parts(parts)),
    "min": lambda *parts: min(_real_parts(parts)),
    "mod": lambda operand, modulus: operand - modulus * _context.floor(operand / modulus),
    "gcd": lambda *parts: _context.mpf(math.gcd(*_whole_parts(parts))),
    "lcm": lambda *parts: _context.mpf(math.lcm(*_whole_parts(parts))),
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
    value is skipped if a formula has logarithms, or roots other than square roots. Formulas that round are also
    compared at whole numbers and halves. Where a sum has terms of very different sizes, more digits are compared.
    """
    first, second = exact(one), exact(other)
    if first is not None and second is not None:
        return first == second * factor
    # An exact number with more digits than are computed equals only exact numbers.
    has_symbols = bool(one.symbols() | other.symbols())
    if not has_symbols and any(_is_longer(each) for each in (first, second)):
        return False
    same, bits = _same_at_points(one, other, factor, has_symbols=has_symbols)
    digits = _digits_for(bits)
    if not same or digits == DIGITS:
        return same
    with _more_digits(digits):
        return digits <= MAX_DIGITS and _same_at_points(one, other, factor, has_symbols=has_symbols)[0]


def _digits_for(bits: int) -> int:
    """Return the digits needed for sums of terms whose magnitudes are `bits` apart."""
    # 3 digits for each lost one: a root of a sum, and the square of a root, lose more than the sum itself.
    return DIGITS if bits <= _SAFE_BITS else DIGITS + bits * 3 * 302 // 1000


@contextmanager
def _more_digits(digits: int) -> Iterator[None]:
    _context.dps = min(digits, MAX_DIGITS)
    try:
        yield
    finally:
        _context.dps = DIGITS


def _same_at_points(one: Node, other: Node, factor: Fraction, *, has_symbols: bool) -> tuple[bool, int]:
    """Return whether two formulas have equal values at all points, and the largest distance of magnitudes in bits."""
    kinds = _KINDS_OF_POINTS if has_symbols else ("positive",)
    whole: frozenset[str] = frozenset()
    if has_symbols and any(map(_is_stepwise, (*one.walk(), *other.walk()))):
        whole = _whole_names(one) | _whole_names(other)
        kinds = (*kinds, *_HALVES)
    compared = bits = 0
    for seed, kind in enumerate(kinds):
        verdict, bits_here = _same_at(one, other, factor, kind, seed, whole)
        if verdict is False:
            return False, 0
        compared += verdict is True
        bits = max(bits, bits_here)
    return compared >= (2 if has_symbols else 1), bits


def _is_stepwise(node: Node) -> bool:
    """Return whether a formula rounds, or has a number of terms."""
    return node.kind == "series" or (node.kind == "call" and node.value in _ROUNDING)


def _whole_names(formula: Node) -> frozenset[str]:
    """Return the variables that are whole numbers: by their usual letters, or because they count terms."""
    names: set[str] = set()
    for node in formula.walk():
        if node.kind == "series":
            names |= node.parts[1].symbols() | node.parts[2].symbols()
        elif node.kind == "call" and node.value in ("gcd", "lcm"):
            names |= node.symbols()
        elif node.kind == "symbol" and node.value in _NAMES_OF_WHOLE_NUMBERS:
            names.add(node.value)
    return frozenset(names)


def _is_longer(number: Fraction | None) -> bool:
    return number is not None and max(number.numerator, number.denominator).bit_length() > 130


def _same_at(
    one: Node, other: Node, factor: Fraction, kind: str, seed: int, whole: frozenset[str]
) -> tuple[bool | None, int]:
    """Return whether two formulas have equal values at one point, and the distance of magnitudes in bits. None: they
    cannot be compared there.
    """
    evaluation = Evaluation(kind, seed, whole)
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
        return (None if kind == "mixed" or first is second else False), 0
    if is_close(first, second, evaluation.scale):
        return True, max(evaluation.bits, _cancelled_bits(evaluation.scale, max(abs(first), abs(second))))
    # Roots and logarithms of negative numbers have several complex branches, so a difference proves nothing.
    complex_values = 2 - _is_real(first) - _is_real(second)
    is_open = complex_values == 2 or (complex_values == 1 and (_has_branches(one) or _has_branches(other)))
    return (None if kind == "mixed" and is_open else False), 0


def _cancelled_bits(scale: Any, value: Any) -> int:
    """Return by how many bits a value is smaller than the largest summand in its formula."""
    return _context.mag(scale) - _context.mag(value) if scale and value else 0


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
    return bool(abs(first - second) <= _tolerance() * max(abs(first), abs(second), scale))


def _tolerance() -> Any:
    return _TOLERANCE if _context.dps == DIGITS else _context.mpf(10) ** (_GUARD_DIGITS - _context.dps)


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
    sign, bits = _proportion(one, other)
    digits = _digits_for(bits)
    if not sign or digits == DIGITS:
        return sign
    with _more_digits(digits):
        return _proportion(one, other)[0] if digits <= MAX_DIGITS else 0


def _proportion(one: Node, other: Node) -> tuple[int, int]:
    """Return the sign of the constant factor between two formulas (0: none), and the distance of magnitudes in bits."""
    ratios: list[Any] = []
    bits = 0
    for seed, kind in enumerate(_KINDS_OF_POINTS):
        evaluation = Evaluation(kind, seed)
        try:
            first, second = evaluation.value(one), evaluation.value(other)
        except NoValueError:
            continue
        # A value that cancelled to almost zero has no reliable ratio.
        if min(abs(first), abs(second)) <= _tolerance() * evaluation.scale or second == 0 or first == 0:
            return 0, 0
        ratios.append(first / second)
        bits = max(bits, evaluation.bits)
    if len(ratios) < 2 or not _is_real(ratios[0]) or not all(is_close(ratios[0], ratio) for ratio in ratios):
        return 0, 0
    return (1 if _context.re(ratios[0]) > 0 else -1), bits
