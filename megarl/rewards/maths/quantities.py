r"""Exact reader of numbers with units.

Examples: `1,234`, `3 1/2`, `1.5e3`, `0.\overline{3}`, `33\frac{1}{3}\%`, `5\text{ cm}^2`, `60 miles per hour`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

from megarl.rewards.maths.numbers import (
    ANY_SEPARATOR,
    MAX_DIGITS,
    NotMathematicsError,
    power_of_ten,
    read_number,
)
from megarl.rewards.maths.spelling import plain_text
from megarl.rewards.maths.units import FRACTION_WORDS, MULTIPLES, Unit, read_unit, unit_named

_POWER_OF_TEN = r"10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?[0-9]+)\s*\}|\(\s*([+-]?[0-9]+)\s*\)|([+-]?[0-9]+))"
_BARE_POWER_OF_TEN = re.compile(_POWER_OF_TEN)
_TIMES_POWER_OF_TEN = re.compile(rf"\s*(?:\\times|\\cdot|\*|x)\s*{_POWER_OF_TEN}")
_DENOMINATOR = r"0*[1-9][0-9]*"
_LATEX_FRACTION = re.compile(
    rf"\\frac\s*(?:\{{\s*(-?[0-9]+)\s*\}}\s*\{{\s*({_DENOMINATOR})\s*\}}|([0-9])\s*([1-9])(?![0-9]))"
)
_SLASHED_FRACTION = re.compile(rf"([0-9]+)\s*/\s*({_DENOMINATOR})")
_SLASH = re.compile(r"\s*/\s*")
_SPACES_OF_MIXED_NUMBER = re.compile(r"\s*(?=\\frac)|\s+")
_SIGN = re.compile(r"\s*([+-]?)\s*")
_NO_NUMBER_FOLLOWS = re.compile(r"\s*(?:[0-9.,!?^_'+*/|(){\[\]}:;=<>~-]|\\ldots|\\cdots|\\dots|$)")
"""Matches a text after a number that cannot be its unit: digits, operators, brackets, or the end."""
_MULTIPLE = re.compile(rf"\s*(?:\\text\s*\{{\s*)?({'|'.join(MULTIPLES)})s?\b\s*\}}?")
_FRACTION_WORD = re.compile(r"(?:\s+|\s*-\s*|\s*\\text\s*\{\s*)([a-z]+)\s*\}?\s*$")
_CURRENCIES = (("\\$", "dollar"), ("$", "dollar"), ("€", "euro"), ("£", "sterling"), ("¥", "yen"), ("₹", "rupee"))
_CURRENCY_NAMES = frozenset(name for _, name in _CURRENCIES)


_SPACES = re.compile(r"(?:\s|\\,|\\ |~)+")
_SEVERAL_UNITS = re.compile(r"[0-9][^A-Za-z]*[A-Za-z][^0-9]*[0-9][^A-Za-z]*[A-Za-z]")
_UNIT_STEP = re.compile(
    r"(?:(?:^|,|\band\b|(?<=[\sA-Za-z.]))\s*)(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?P<unit>[A-Za-z]+)\b\.?\s*",
    re.ASCII,
)
"""Matches one part of a quantity in several units: `and 30 min`."""
_AMOUNT = re.compile(r"\s*([A-Za-z¢€£¥₹]+)\s*(?:(/|(?:per|an?|each|every|apiece)\b)\s*(.*))?", re.DOTALL)
"""Matches a currency, optionally followed by `each`, `per` or `/` and the bought thing."""


@dataclass(frozen=True)
class Quantity:
    """An exact number with or without a unit.

    `money` is the currency of a price, as in `$5 per hour`. `smallest` is the last of several units (`2 h 30 min`); the
    number is in the first unit.
    """

    number: Fraction
    unit: Unit | None = None
    money: Unit | None = None
    smallest: Unit | None = None

    @property
    def value(self) -> Fraction:
        """Return the number converted to base units."""
        return self.number * self.unit.factor if self.unit else self.number


def read_quantity(text: str, unit_words: Collection[str] | None = None) -> Quantity | None:
    """Parse a number with or without a unit. None: any other text.

    `unit_words` are further words that count as units. None: any word counts.
    """
    text, currency = without_currency(text)
    number_and_end = _read_number(text)
    if number_and_end is None:
        return None
    number, end = number_and_end
    unit_text = text[end:]
    if not unit_text.strip():
        return Quantity(number, currency)
    in_several_units = _read_several_units(text) if currency is None else None
    if in_several_units is not None:
        return in_several_units
    price = _read_amount(number, currency, unit_text, unit_words)
    if price is not None:
        return price
    # A degree sign is written as a power, but it is a unit.
    if _NO_NUMBER_FOLLOWS.match(unit_text) and not re.match(r"\s*\^\s*\{?\s*\\circ", unit_text):
        return None
    if currency is not None and not _MULTIPLE.match(unit_text):
        return None
    if re.match(r"[A-Za-z](?![A-Za-z])", unit_text):
        # "5m" is a product, but "5 m" is a length.
        return None
    word = _FRACTION_WORD.match(unit_text)
    if word and word[1] in FRACTION_WORDS:
        # "2 fifths" is 2/5, but nobody writes "1/2 fifths".
        return Quantity(number * FRACTION_WORDS[word[1]]) if number.denominator == 1 else None
    words = plain_text(unit_text)
    if multiple := _MULTIPLE.match(words):
        number *= MULTIPLES[multiple[1]]
        unit_text = words[multiple.end() :]
    if not unit_text.strip():
        return Quantity(number, currency)
    # Without a space, as in "5x", a word is a unit only if it has a meaning.
    is_known, unit = read_unit(unit_text, () if unit_text[0].isalpha() else unit_words)
    if currency is not None:
        return _read_amount(number, currency, unit_text, unit_words)
    return Quantity(number, unit) if is_known else None


def _read_several_units(text: str) -> Quantity | None:
    """Parse a quantity in descending units of one kind, or return None: `2 h 30 min`, `5 feet 6 inches`."""
    if not _SEVERAL_UNITS.search(text):
        return None
    words = _SPACES.sub(" ", plain_text(text)).strip()
    steps = [(Fraction(step["number"]), step["unit"]) for step in _UNIT_STEP.finditer(words)]
    if len(steps) < 2 or _UNIT_STEP.sub("", words).strip():
        return None
    units = [read_unit(f"\\text{{{name}}}", ())[1] for _, name in steps]
    first, *smaller_units = units
    total = Fraction(0)
    limit = None
    for (number, _), unit in zip(steps, units, strict=True):
        # Each part is less than one of the unit before it: not 2 h 90 min, and not 3 m 4 m.
        if unit is None or first is None or unit.dimensions != first.dimensions or unit.is_percentage:
            return None
        if limit is not None and not number * unit.factor < limit:
            return None
        total += number * unit.factor
        limit = unit.factor
    assert first is not None
    return Quantity(total / first.factor, first, smallest=smaller_units[-1])


def _read_amount(
    number: Fraction, currency: Unit | None, text: str, unit_words: Collection[str] | None
) -> Quantity | None:
    """Return a number as a price for something, or None if the text after the number does not make it a price.

    After a currency, or if a currency sign precedes the number, these are prices: `per hour`, `/hour`, `an hour`,
    `bought_unit`.
    """
    words = _SPACES.sub(" ", plain_text(text)).strip()
    amount = _AMOUNT.fullmatch(words)
    money = _currency_named(amount[1]) if amount else None
    if currency is not None and money != currency:
        # The sign stands for the currency's name.
        amount, money = _AMOUNT.fullmatch(f"{currency.dimensions[0][0]} {words}"), currency
    if amount is None or money is None or (amount[2] is None and currency is None):
        return None
    if not amount[3]:
        return Quantity(number, money) if amount[2] in (None, "each", "apiece") else None
    is_known, bought_unit = read_unit(amount[3], unit_words)
    if not is_known or amount[2] == "apiece" or (bought_unit and set(bought_unit.names) & _CURRENCY_NAMES):
        return None
    if bought_unit is None:
        return Quantity(number, money)
    return Quantity(number, money.over(bought_unit), money)


def _currency_named(word: str) -> Unit | None:
    is_known, unit = read_unit(word, ())
    return unit if is_known and unit and unit.names <= _CURRENCY_NAMES else None


def same_quantity(prediction: Quantity, gold: Quantity) -> bool:
    """Return whether a predicted quantity equals the gold answer exactly.

    If both have a unit, the prediction is converted to the gold's unit. If only one has a unit, only the numbers count.
    """
    # 2 h 30 min needs its units as gold answer. As prediction it also equals 2.5 and 150.
    if gold.smallest and not prediction.unit:
        return False
    if prediction.smallest and not gold.unit:
        return gold.number in (prediction.number, prediction.value / prediction.smallest.factor)
    if gold.unit and prediction.unit:
        if gold.unit.power_of_any or prediction.unit.power_of_any:
            return gold.unit.may_be(prediction.unit) and prediction.number == gold.number
        # A price for something also equals the amount alone: $5 per hour and $5.
        for rate, amount in ((prediction, gold), (gold, prediction)):
            if rate.money and amount.unit and amount.unit.dimensions == rate.money.dimensions:
                return rate.number * rate.money.factor == amount.value
        # 5 degrees may be 5 degrees Celsius. As gold answer they may be an angle.
        if gold.unit.is_temperature and prediction.unit == unit_named("degree"):
            return prediction.number == gold.number
        return gold.unit.dimensions == prediction.unit.dimensions and gold.value == prediction.value
    # 0.5% is 0.005 and hardly ever 0.5, while 50% may be 50 or 0.5.
    if prediction.unit and prediction.unit.is_percentage and abs(prediction.number) < 1:
        return prediction.value == gold.value
    if prediction.number == gold.number:
        return True
    has_percentage = any(quantity.unit and quantity.unit.is_percentage for quantity in (prediction, gold))
    return has_percentage and prediction.value == gold.value


def without_currency(text: str) -> tuple[str, Unit | None]:
    """Return the text without a currency sign at its start, and the currency or None."""
    text = text.strip()
    for sign, name in _CURRENCIES:
        for negative in ("-", ""):
            if text.startswith(negative + sign):
                return negative + text[len(negative + sign) :], unit_named(name)
    return text, None


def _read_number(text: str) -> tuple[Fraction, int] | None:
    """Return the number at the start of a text and the position after it, or None."""
    sign = _SIGN.match(text)
    assert sign is not None
    try:
        number_and_end = _read_unsigned_number(text, sign.end())
    except NotMathematicsError:
        return None
    if number_and_end is None or number_and_end[1] - sign.end() > MAX_DIGITS:
        return None
    value, end = number_and_end
    return (-value if sign[1] == "-" else value), end


def _read_unsigned_number(text: str, start: int) -> tuple[Fraction, int] | None:
    """Read an unsigned fraction, power of ten, mixed number, ratio, or decimal, maybe with a power of ten."""
    if fraction := _read_fraction(_LATEX_FRACTION, text, start):
        return fraction
    if power := _BARE_POWER_OF_TEN.match(text, start):
        return _power_value(power), power.end()
    number_and_end = read_number(text, start, ANY_SEPARATOR)
    if number_and_end is None:
        return None
    value, end = number_and_end
    if text[start:end].isdigit() and (mixed_part := _read_mixed_number(text, end)) is not None:
        part, end = mixed_part
        # 3 5/2 is not a mixed number, and reading it as a product would guess.
        return (value + part, end) if 0 <= part < 1 else None
    if times_power := _TIMES_POWER_OF_TEN.match(text, end):
        return value * _power_value(times_power), times_power.end()
    slash = _SLASH.match(text, end)
    divisor = read_number(text, slash.end(), ANY_SEPARATOR) if slash else None
    if divisor is None:
        return value, end
    return (value / divisor[0], divisor[1]) if divisor[0] else None


def _read_mixed_number(text: str, position: int) -> tuple[Fraction, int] | None:
    """Return the fraction after a whole part that ends at `position`, as in `3 1/2`, or None."""
    spaces = _SPACES_OF_MIXED_NUMBER.match(text, position)
    if spaces is None:
        return None
    fraction = _read_fraction(_LATEX_FRACTION, text, spaces.end())
    return fraction or _read_fraction(_SLASHED_FRACTION, text, spaces.end())


def _read_fraction(pattern: re.Pattern[str], text: str, position: int) -> tuple[Fraction, int] | None:
    match = pattern.match(text, position)
    if match is None:
        return None
    numerator, denominator = (int(digits) for digits in match.groups() if digits is not None)
    return Fraction(numerator, denominator), match.end()


def _power_value(match: re.Match[str]) -> Fraction:
    (exponent,) = (digits for digits in match.groups() if digits is not None)
    return power_of_ten(exponent)
