r"""Numbers at a position of a text: `1,234.5`, `1.5e3`, `0.1\overline{6}`, `0.1666...`, `1A_{16}`. Only ASCII digits
count.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

MAX_DIGITS = 1000
"""Maximum digits of a number, and maximum exponent of its power of ten."""

COMMA = ","
ANY_SEPARATOR = r"(?:,\\!|,|\{,\}|\\!|\\,|\\ | |~)"
"""Matches separators of thousands: only a comma, or all of LaTeX's separators."""

_EXPONENT = r"(?:(?<=[\d.])[eE](?P<exponent>[+-]?\d+)(?![\d.A-Za-z]))?"
# Two notations. A period under an overline, bar or dot, 0.1\overline{6}: `fixed` is 0.1, and the period 6 is `braced`,
# or `bare` without braces. Dots after repeated digits, 0.1666...: `dotted` is 0.1666, `period` is 6.
_REPEATING = re.compile(
    r"(?P<fixed>\d*\.\d*)(?:\\overline|\\bar|\\dot)\s*(?:\{\s*(?P<braced>\d+)\s*\}|(?P<bare>\d))(?!\d)"
    r"|(?P<dotted>\d*\.\d*?(?P<period>\d+?)(?P=period)+)(?:\s*\\[lc]?dots(?![A-Za-z])|\.\.\.)",
    re.ASCII,
)
_IN_BASE = re.compile(
    r"(?P<digits>\d[0-9A-F]*)_\s*(?:(?P<bare>\d{1,2})(?!\d)"
    r"|\{\s*(?:\\(?:text|mathrm)\s*\{)?\s*(?P<base>\d{1,2}|[a-z]+)\s*\}{1,2}|(?P<name>ten|two)\b)",
    re.ASCII,
)
_BASE_NAMES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
}  # fmt: skip


class NotMathematicsError(ValueError):
    """Raised for a text that is not a known formula, or exceeds the limits of size."""


def read_number(text: str, position: int, separator: str | None = None) -> tuple[Fraction, int] | None:
    """Return the unsigned number at `position` and the position after it, or None.

    `separator` is the regular expression of separators of thousands; None: no separators. Raises NotMathematicsError
    beyond MAX_DIGITS.
    """
    repeating = _REPEATING.match(text, position)
    # 0.33... may be a rounded decimal, so a single digit must occur three times.
    if repeating and (
        repeating["dotted"] is None
        or len(repeating["period"]) > 1
        or repeating["dotted"].endswith(3 * repeating["period"])
    ):
        _check_length(repeating)
        return _repeating_decimal(repeating), repeating.end()
    decimal = _decimal_pattern(separator).match(text, position)
    if decimal is None or decimal.end() == position:
        return None
    _check_length(decimal)
    number = Fraction(re.sub(r"[^0-9.]", "", decimal["mantissa"]).rstrip("."))
    return number * power_of_ten(decimal["exponent"] or "0"), decimal.end()


def read_based_number(text: str, position: int) -> tuple[Fraction, int] | None:
    """Return the number with a base at `position`, as in `101_2`, and the position after it, or None.

    Raises NotMathematicsError beyond MAX_DIGITS, and for digits outside the base.
    """
    match = _IN_BASE.match(text, position)
    if match is None:
        return None
    _check_length(match)
    base_name = match["bare"] or match["base"] or match["name"]
    base = int(base_name) if base_name.isdigit() else _BASE_NAMES.get(base_name, 0)
    if not 2 <= base <= 36:
        raise NotMathematicsError(f"the base {base_name} of a number is not one of 2 to 36")
    try:
        return Fraction(int(match["digits"], base)), match.end()
    except ValueError:
        raise NotMathematicsError(f"{match['digits']} is not a number in base {base}") from None


def power_of_ten(exponent: str) -> Fraction:
    """Return 10 to the power of a whole number. Raises NotMathematicsError beyond MAX_DIGITS."""
    # 10**100000 would take too much memory and time.
    if len(exponent) > 5 or abs(int(exponent)) > MAX_DIGITS:
        raise NotMathematicsError("a power of ten has a too large exponent")
    return Fraction(10) ** int(exponent)


@lru_cache
def _decimal_pattern(separator: str | None) -> re.Pattern[str]:
    groups = rf"[1-9]\d{{0,2}}(?:{separator}\d{{3}})+(?!{separator}?\d|,)|" if separator else ""
    return re.compile(rf"(?P<mantissa>(?:{groups}\d+)?(?:\.\d+|(?<=\d)\.(?![\d.]))?){_EXPONENT}", re.ASCII)


def _check_length(match: re.Match[str]) -> None:
    if match.end() - match.start() > MAX_DIGITS:
        raise NotMathematicsError("a number has more than MAX_DIGITS digits")


def _repeating_decimal(match: re.Match[str]) -> Fraction:
    """Return the exact value of a repeating decimal, from a match of `_REPEATING`."""
    if match["dotted"] is None:
        digits, period = match["fixed"], match["braced"] or match["bare"]
    else:
        digits, period = match["dotted"], match["period"]
        while digits.endswith(period):
            digits = digits.removesuffix(period)
    integer_digits, _, decimals = digits.partition(".")
    # 0.1666... is 1 / 10 + (6 / 9) / 10; its digits before the period are 0.1.
    scale = Fraction(10) ** len(decimals)
    return int(integer_digits + decimals or "0") / scale + Fraction(int(period), 10 ** len(period) - 1) / scale
