"""Functions of numbers in 50 digits: powers, roots, logarithms, trigonometry, gamma, greatest common divisors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from megarl.rewards.maths.equality.exact import NoValueError
from megarl.rewards.maths.equality.precision import CONTEXT, DIGITS, as_fraction, is_real

MAX_MAGNITUDE = 400
"""Maximum binary exponent of arguments to functions and powers: the digits needed grow with it."""
_MAX_POWER_BITS = 1 << 20
"""Maximum binary exponent of a power: mpmath computes with about as many bits."""
_MAX_EXPONENT = 1 << 40
MAX_GAMMA = 1 << 24
"""Maximum argument of the gamma function. Larger arguments take too long."""
MAX_ZETA = 50
"""Maximum argument of the zeta function. Larger arguments take too long."""


def _check_magnitude(value: Any) -> Any:
    if value != 0 and CONTEXT.mag(value) > MAX_MAGNITUDE:
        raise NoValueError
    return value


def raise_to_power(base: Any, exponent: Any) -> Any:
    _check_magnitude(exponent)
    if base == 0:
        if not is_real(exponent) or CONTEXT.re(exponent) <= 0:
            raise NoValueError
        return CONTEXT.mpf(0)
    # The magnitude of a base between 0.5 and 1 is 0, so the exponent has a limit too.
    if abs(CONTEXT.mag(base) * exponent) > _MAX_POWER_BITS or abs(exponent) > _MAX_EXPONENT:
        raise NoValueError
    return CONTEXT.power(base, exponent)


def _root(radicand: Any, degree: Any) -> Any:
    if degree == 2:
        return CONTEXT.sqrt(radicand)
    # An odd root of a negative number is real, while mpmath would take the complex principal value.
    if is_real(radicand) and CONTEXT.re(radicand) < 0 and degree == int(CONTEXT.re(degree)) and int(degree) % 2:
        return -CONTEXT.power(-CONTEXT.re(radicand), 1 / degree)
    return raise_to_power(radicand, 1 / degree)


def _log(operand: Any, base: Any) -> Any:
    if operand == 0:
        raise NoValueError
    return CONTEXT.log(operand) / CONTEXT.log(base)


def _gamma_of(operand: Any) -> Any:
    if abs(operand) > MAX_GAMMA:
        raise NoValueError
    return CONTEXT.gamma(operand + 1)


def _double_factorial(operand: Any) -> Any:
    (number,) = _whole_parts((operand,))
    if not 0 <= number <= MAX_GAMMA:
        raise NoValueError
    return CONTEXT.fac2(number)


@lru_cache(maxsize=1024)
def _zeta(operand: Any) -> Any:
    # With more digits, one value takes a second.
    if abs(operand) > MAX_ZETA or not is_real(operand) or CONTEXT.dps > DIGITS:
        raise NoValueError
    return CONTEXT.zeta(operand)


def _binomial(over: Any, under: Any) -> Any:
    if max(abs(over), abs(under)) > MAX_GAMMA:
        raise NoValueError
    return CONTEXT.binomial(over, under)


def _real_parts(parts: tuple[Any, ...]) -> list[Any]:
    if not all(is_real(part) for part in parts):
        raise NoValueError
    return [CONTEXT.re(part) for part in parts]


def _whole_parts(parts: tuple[Any, ...]) -> list[int]:
    numbers = [as_fraction(part) for part in _real_parts(parts)]
    if any(number.denominator != 1 for number in numbers):
        raise NoValueError
    return [int(number) for number in numbers]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "root": _root,
    "log": _log,
    "abs": abs,
    "floor": CONTEXT.floor,
    "ceiling": CONTEXT.ceil,
    "factorial": _gamma_of,
    "double_factorial": _double_factorial,
    "gamma": lambda operand: _gamma_of(operand - 1),
    "zeta": _zeta,
    "binomial": _binomial,
    "max": lambda *parts: max(_real_parts(parts)),
    "min": lambda *parts: min(_real_parts(parts)),
    "mod": lambda operand, modulus: operand - modulus * CONTEXT.floor(operand / modulus),
    "gcd": lambda *parts: CONTEXT.mpf(math.gcd(*_whole_parts(parts))),
    "lcm": lambda *parts: CONTEXT.mpf(math.lcm(*_whole_parts(parts))),
    "arcsin": CONTEXT.asin, "arccos": CONTEXT.acos, "arctan": CONTEXT.atan, "arccot": CONTEXT.acot,
    "arcsec": CONTEXT.asec, "arccsc": CONTEXT.acsc, "cis": CONTEXT.expj,
    "arcsinh": CONTEXT.asinh, "arccosh": CONTEXT.acosh, "arctanh": CONTEXT.atanh,
} | {
    name: getattr(CONTEXT, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth")
}  # fmt: skip


def call_function(name: str, parts: list[Any]) -> Any:
    function = _FUNCTIONS.get(name)
    if function is None:
        raise NoValueError
    if name not in ("abs", "root", "log"):
        for part in parts:
            _check_magnitude(part)
            # Functions of large numbers need more digits.
            if name.endswith("h") and abs(part) > 1000:
                raise NoValueError
    return function(*parts)
