"""Precision of numeric values: 50 digits, or more if terms of very different sizes cancel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import mpmath

from megarl.rewards.maths.equality.exact import MAX_BITS, NoValueError

DIGITS = 50
MAX_DIGITS = 1000
"""Maximum digits of a value, because gamma functions take seconds with more."""
_GUARD_DIGITS = 10
"""Number of last digits that may differ by rounding errors. Values with equal earlier digits are equal."""
_SAFE_BITS = 64
"""Largest difference of summands' binary exponents for which `DIGITS` are enough."""

# A clone: changing the precision must not affect other users of mpmath in this process.
CONTEXT = mpmath.mp.clone()
CONTEXT.dps = DIGITS
_TOLERANCE = CONTEXT.mpf(10) ** (_GUARD_DIGITS - DIGITS)


def count_digits(bits: int) -> int:
    """Return the digits needed for sums of terms whose binary exponents differ by `bits`."""
    # 3 digits for each lost digit: a root of a sum, and a root's square, lose more digits than the sum.
    return DIGITS if bits <= _SAFE_BITS else DIGITS + bits * 3 * 302 // 1000


@contextmanager
def with_digits(digits: int) -> Iterator[None]:
    CONTEXT.dps = min(digits, MAX_DIGITS)
    try:
        yield
    finally:
        CONTEXT.dps = DIGITS


def is_close(first: Any, second: Any, scale: Any = 0) -> bool:
    return bool(abs(first - second) <= tolerance() * max(abs(first), abs(second), scale))


def tolerance() -> Any:
    return _TOLERANCE if CONTEXT.dps == DIGITS else CONTEXT.mpf(10) ** (_GUARD_DIGITS - CONTEXT.dps)


def is_real(value: Any) -> bool:
    return not isinstance(value, CONTEXT.mpc) or abs(value.imag) <= _TOLERANCE * (1 + abs(value))


def as_fraction(value: Any) -> Fraction:
    """Return a floating-point number as an exact fraction. Raises NoValueError if it is too large."""
    sign, mantissa, exponent, _ = CONTEXT.mpf(value)._mpf_
    if abs(exponent) > MAX_BITS:
        raise NoValueError
    return (-1 if sign else 1) * Fraction(int(mantissa)) * Fraction(2) ** exponent
