"""An exact parser of plain numbers with units.

`1,234`, `3 1/2`, `1.5e3`, `0.\\overline{3}`, `33\\frac{1}{3}\\%`, `5\\text{ cm}^2`, `60 miles per hour`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 1000
"""Limit of a number's digits, and of its power of ten."""

_DIGITS = r"(?:[1-9]\d{0,2}(?:(?:,|\{,\}|\\!|\\,|\\ | |~)+\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_REPEATING = r"(?:\d+\.\d*\\overline\{\d+\}|\d+\.\d*?(?P<repeated>\d+?)(?P=repeated){2,}(?:\\[lc]?dots|\.\.\.))"
_POWER_OF_TEN = r"10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))"
_DENOMINATOR = r"(?:0*[1-9]\d*)"
_FRACTION = (
    rf"(?:\\frac\s*\{{\s*(?P<n1>-?\d+)\s*\}}\s*\{{\s*(?P<d1>{_DENOMINATOR})\s*\}}"
    rf"|\\frac\s*(?P<n2>\d)\s*(?P<d2>[1-9])|(?P<n3>\d+)\s*/\s*(?P<d3>{_DENOMINATOR}))"
)
_SIGN = re.compile(r"\s*([+-]?)\s*")
_NUMBERS = {
    "repeating": re.compile(_REPEATING),
    "mixed": re.compile(rf"(?P<whole>\d+)(?:\s*(?=\\frac)|\s+){_FRACTION}"),
    "fraction": re.compile(_FRACTION),
    "ratio": re.compile(rf"(?P<over>{_DECIMAL})\s*/\s*(?P<under>{_DECIMAL})"),
    "scientific": re.compile(
        rf"(?P<mantissa>{_DECIMAL})(?:[eE](?P<exponent>[+-]?\d+)|\s*(?:\\times|\\cdot|\*|x)\s*{_POWER_OF_TEN})"
    ),
    "power": re.compile(_POWER_OF_TEN),
    "decimal": re.compile(_DECIMAL),
}
"""Forms of an unsigned number; the longest match counts."""


@dataclass(frozen=True)
class Unit:
    """A unit as a multiple of base units: `cm^2` is 1/10000 of metre^2; `%` is 1/100, without dimensions."""

    factor: Fraction
    dimensions: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Quantity:
    """An exact number with or without a unit."""

    number: Fraction
    unit: Unit | None = None

    @property
    def value(self) -> Fraction:
        """The number in base units."""
        return self.number * self.unit.factor if self.unit else self.number


def read_quantity(text: str) -> Quantity | None:
    """Parse a text that is a number with or without a unit; None for any other text."""
    text, currency = _without_currency(text)
    number, end = _read_number(text)
    if number is None:
        return None
    rest = text[end:]
    if not rest.strip():
        return Quantity(number, currency)
    if currency is not None or re.match(r"[A-Za-z](?![A-Za-z])", rest):
        # "5m" is a product, "5 m" a length.
        return None
    for multiple, size in _MULTIPLES.items():
        if found := re.match(rf"\s*(?:\\text\{{\s*)?{multiple}\b\s*\}}?", rest):
            number *= size
            rest = rest[found.end() :]
            break
    if not rest.strip():
        return Quantity(number)
    is_known, unit = read_unit(rest, allow_unknown=not rest[0].isalpha())
    return Quantity(number, unit) if is_known else None


def split_unit(text: str) -> tuple[str, Unit | None]:
    """Split an expression from the unit at its end: a `\\text{...}`, or a known unit in words."""
    text, currency = _without_currency(text)
    if currency is not None:
        return text, currency
    for found in re.finditer(
        r"(?<=[\w)}\]%])\s*(?:\\%|%|\^\s*\{?\s*\\circ\s*\}?|°|\\(?:text|mathrm|mbox|textrm)\b|(?<=\s)[A-Za-z])", text
    ):
        value, rest = text[: found.start()], text[found.start() :]
        is_named = "\\text" in rest or "\\mathrm" in rest or "\\mbox" in rest
        is_known, unit = read_unit(rest, allow_unknown=is_named)
        if is_known and value.strip():
            return value, unit
    return text, None


def same_quantity(prediction: Quantity, gold: Quantity) -> bool:
    """Whether the numbers are equal, exactly.

    Units are compared if the gold answer has one: a prediction in another unit is converted, one without has
    the gold's. A percentage also equals its value as a fraction: 50% and 0.5.
    """
    if gold.unit and prediction.unit:
        return gold.unit.dimensions == prediction.unit.dimensions and gold.value == prediction.value
    if prediction.number == gold.number:
        return True
    is_percentage = any(q.unit and not q.unit.dimensions for q in (prediction, gold))
    return is_percentage and prediction.value == gold.value


def read_unit(text: str, *, allow_unknown: bool) -> tuple[bool, Unit | None]:
    """Whether `text` is a unit, and which; None for a unit without meaning, such as "units" or "th" of "5th".

    With `allow_unknown`, any other word is a unit of its own ("apples").
    """
    factor = Fraction(1)
    dimensions: Counter[str] = Counter()
    words = 0
    for name, exponent in _unit_words(text):
        words += 1
        if words > 4 or name is None:
            return False, None
        if name in _NO_UNIT:
            continue
        found = _UNITS.get(name) or _UNITS.get(_singular(name.lower()))
        if found is None:
            if not allow_unknown or name.lower() in _NOT_A_UNIT or not re.fullmatch(r"[A-Za-zµ]{2,}", name):
                return False, None
            found = (Fraction(1), {_singular(name.lower()): 1})
        factor *= found[0] ** exponent
        for base, power in found[1].items():
            dimensions[base] += power * exponent
    if not words:
        return False, None
    left = tuple(sorted((base, power) for base, power in dimensions.items() if power))
    return True, Unit(factor, left) if left or factor != 1 else None


_WRAPPED = re.compile(r"\\(?:text|mathrm|textrm|mbox|textit|textbf|operatorname)\s*\{([^{}]*)\}")
_UNIT_PART = re.compile(
    r"\s*(?:(?P<over>/|\bper\b)|(?P<power>square|cubic|sq\.?|cu\.?)\b|(?P<word>[A-Za-zµ°¢%€£]+)\.?)"
    r"(?P<exponent>\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d)|[²³])?(?:\s|\\,|\\cdot|~)*"
)


def _unit_words(text: str) -> Iterator[tuple[str | None, int]]:
    """Each word of a unit with its exponent; None for text that cannot be in a unit."""
    text = _WRAPPED.sub(r" \1 ", text.replace("\\%", "%").replace("\\$", "dollar"))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?\b|°", " degree ", text)
    text = re.sub(r"^(?:\s|\\,|\\ |~)+|\s+$", "", text.replace("\\ ", " "))
    position = 0
    sign, before = 1, 1
    while position < len(text):
        found = _UNIT_PART.match(text, position)
        if found is None or found.end() == position:
            yield None, 1
            return
        position = found.end()
        if found["over"]:
            sign = -1
        elif found["power"]:
            before = 2 if found["power"].startswith("s") else 3
        else:
            after = (found["exponent"] or "1").translate(str.maketrans("²³", "23", "^{} "))
            yield found["word"], sign * before * int(after)
            before = 1


def _singular(word: str) -> str:
    for plural, singular in (("feet", "foot"), ("inches", "inch"), ("people", "person"), ("ies", "y")):
        if word.endswith(plural):
            return word.removesuffix(plural) + singular
    return word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word


def _without_currency(text: str) -> tuple[str, Unit | None]:
    text = text.strip()
    for sign, name in (("\\$", "dollar"), ("$", "dollar"), ("€", "euro"), ("£", "sterling")):
        for negative in ("-", ""):
            if text.startswith(negative + sign):
                return negative + text[len(negative + sign) :], Unit(*_with_dimensions(_UNITS[name]))
    return text, None


def _with_dimensions(unit: tuple[Fraction, dict[str, int]]) -> tuple[Fraction, tuple[tuple[str, int], ...]]:
    return unit[0], tuple(sorted(unit[1].items()))


def _read_number(text: str) -> tuple[Fraction | None, int]:
    """The number at the start of `text`, and the index of its end."""
    sign = _SIGN.match(text)
    assert sign is not None
    found = [(form, match) for form, pattern in _NUMBERS.items() if (match := pattern.match(text, sign.end()))]
    if not found:
        return None, 0
    form, match = max(found, key=lambda each: each[1].end())
    if match.end() - match.start() > MAX_DIGITS:
        return None, 0
    number = _value(form, match)
    if number is None:
        return None, 0
    return (-number if sign[1] == "-" else number), match.end()


def _value(form: str, match: re.Match[str]) -> Fraction | None:
    if form == "decimal":
        return _decimal(match[0])
    if form == "fraction":
        return _fraction(match)
    if form == "mixed":
        part = _fraction(match)
        return int(match["whole"]) + part if 0 <= part < 1 else None
    if form == "ratio":
        under = _decimal(match["under"])
        return _decimal(match["over"]) / under if under else None
    if form == "repeating":
        return _repeating(match)
    *_, in_braces, bare = match.groups()
    exponent = (match["exponent"] if form == "scientific" else None) or in_braces or bare
    if abs(int(exponent)) > MAX_DIGITS:
        return None
    mantissa = _decimal(match["mantissa"]) if form == "scientific" else Fraction(1)
    return mantissa * Fraction(10) ** int(exponent)


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[^\d.]", "", text).strip(".") if text.endswith(".") else re.sub(r"[^\d.]", "", text))


def _fraction(match: re.Match[str]) -> Fraction:
    for way in "123":
        if match[f"n{way}"] is not None:
            return Fraction(int(match[f"n{way}"]), int(match[f"d{way}"]))
    raise AssertionError("a fraction has a numerator")


def _repeating(match: re.Match[str]) -> Fraction:
    """`0.1\\overline{6}`, or `0.1666...` with the same digits three times at least."""
    if repeated := match["repeated"]:
        fixed = match[0].split(repeated * 3)[0]
    else:
        fixed, _, repeated = match[0].rstrip("}").partition("\\overline{")
    decimals = len(fixed.partition(".")[2])
    tail = Fraction(int(repeated), 10 ** len(repeated) - 1)
    return Fraction(fixed.rstrip(".")) + tail / 10**decimals


_MULTIPLES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NO_UNIT = {"unit", "units", "st", "nd", "rd", "th"}
_NOT_A_UNIT = set(
    """
    and or not no half third quarter plus minus times over to by less least more most than about approximately if is
    are the an at only between from for with without except divided modulo mod remainder choose squared cubed
    """.split()  # noqa: SIM905
)
"""Words beside a number that are no unit: they change it, or make it no number."""

_LENGTH, _TIME, _MASS, _VOLUME = {"metre": 1}, {"second": 1}, {"gram": 1}, {"metre": 3}
_LITRE = Fraction(1, 1000)
_GALLON = Fraction("0.003785411784")
_POUND = Fraction("453.59237")
_UNITS: dict[str, tuple[Fraction, dict[str, int]]] = {
    name: (Fraction(factor), dimensions)
    for names, factor, dimensions in (
        ("m meter metre", 1, _LENGTH),
        ("km kilometer kilometre", 1000, _LENGTH),
        ("dm decimeter decimetre", "0.1", _LENGTH),
        ("cm centimeter centimetre", "0.01", _LENGTH),
        ("mm millimeter millimetre", "0.001", _LENGTH),
        ("in inch", "0.0254", _LENGTH),
        ("ft foot", "0.3048", _LENGTH),
        ("yd yard", "0.9144", _LENGTH),
        ("mi mile", "1609.344", _LENGTH),
        ("s sec second", 1, _TIME),
        ("ms millisecond", "0.001", _TIME),
        ("min minute", 60, _TIME),
        ("h hr hour", 3600, _TIME),
        ("day", 86400, _TIME),
        ("week", 604800, _TIME),
        ("month", 1, {"month": 1}),
        ("yr year", 12, {"month": 1}),
        ("g gram", 1, _MASS),
        ("mg milligram", "0.001", _MASS),
        ("kg kilogram", 1000, _MASS),
        ("lb pound", _POUND, _MASS),
        ("oz ounce", _POUND / 16, _MASS),
        ("l L liter litre", _LITRE, _VOLUME),
        ("ml mL milliliter millilitre", _LITRE / 1000, _VOLUME),
        ("gal gallon", _GALLON, _VOLUME),
        ("quart", _GALLON / 4, _VOLUME),
        ("pint", _GALLON / 8, _VOLUME),
        ("cup", _GALLON / 16, _VOLUME),
        ("mph", Fraction("1609.344") / 3600, {"metre": 1, "second": -1}),
        ("dollar usd USD", 1, {"dollar": 1}),
        ("cent ¢", "0.01", {"dollar": 1}),
        ("euro € EUR", 1, {"euro": 1}),
        ("sterling £", 1, {"sterling": 1}),
        ("degree deg", 1, {"degree": 1}),
        ("radian rad", 1, {"radian": 1}),
        ("percent %", "0.01", {}),
    )
    for name in names.split()
}
