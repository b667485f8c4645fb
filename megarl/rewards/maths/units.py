"""Units after a number: their recognition, and their conversion to base units."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction

Dimensions = tuple[tuple[str, int], ...]
MAX_UNIT_WORDS = 4


@dataclass(frozen=True)
class Unit:
    """A unit as a multiple of base units: `cm^2` is 1/10000 of metre^2; `%` is 1/100 without dimensions."""

    factor: Fraction
    dimensions: Dimensions

    @property
    def is_percentage(self) -> bool:
        return not self.dimensions

    @property
    def is_temperature(self) -> bool:
        return self.names <= {"celsius", "fahrenheit"} and [power for _, power in self.dimensions] == [1]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.dimensions)

    @property
    def power_of_any(self) -> int:
        """Return the power of an unnamed unit: 2 for square units. 0: the unit is named."""
        return self.dimensions[0][1] if len(self.dimensions) == 1 and self.names == {_ANY_UNIT} else 0

    def may_be(self, other: Unit) -> bool:
        """Return whether two units can be the same, if one or both have no name, as in `12 square units`."""
        powers = {self.power_of_any, other.power_of_any} - {0}
        are_unnamed = self.power_of_any and other.power_of_any
        lengths = {power for unit in (self, other) for base, power in unit.dimensions if unit.names == {"metre"}}
        # "12 units" may be anything, but "12 cubic units" are neither an area nor edges.
        return len(powers) == 1 and bool(are_unnamed or powers == {1} or powers == lengths)

    def over(self, divisor: Unit) -> Unit:
        dimensions = Counter(dict(self.dimensions))
        dimensions.subtract(dict(divisor.dimensions))
        remaining = tuple(sorted((base, power) for base, power in dimensions.items() if power))
        return Unit(self.factor / divisor.factor, remaining)


def read_unit(text: str, unit_words: Collection[str] | None = None) -> tuple[bool, Unit | None]:
    """Return whether a text is a unit, and the unit.

    The unit is None for words that do not change the number ("th" of "5th"). Words in `unit_words` (singular) count as
    units. With None every word does, except words that change a number, like "halves" or "about".
    """
    factor = Fraction(1)
    dimensions: Counter[str] = Counter()
    num_words = power_of_any = 0
    for name, exponent in _split_unit_words(text):
        num_words += 1
        # More words are a sentence, not a unit.
        if num_words > MAX_UNIT_WORDS or name is None:
            return False, None
        if name in _ORDINAL_ENDINGS:
            continue
        if name in _ANY_UNITS:
            power_of_any += exponent
            continue
        meaning = _find_meaning(name, unit_words, is_text=text.lstrip().startswith("\\"))
        if meaning is None:
            return False, None
        factor *= meaning[0] ** exponent
        for base, power in meaning[1].items():
            dimensions[base] += power * exponent
    if not num_words:
        return False, None
    if power_of_any and not dimensions and factor == 1:
        return True, Unit(factor, ((_ANY_UNIT, power_of_any),))
    base_units = tuple(sorted((base, power) for base, power in dimensions.items() if power))
    return True, Unit(factor, base_units) if base_units or factor != 1 else None


def _find_meaning(
    name: str, unit_words: Collection[str] | None, *, is_text: bool
) -> tuple[Fraction, dict[str, int]] | None:
    """Return a unit's factor and its base units with exponents. None: the word is not a unit."""
    singular = _make_singular(name.lower())
    if singular == "pound" and unit_words is not None and "sterling" in unit_words:
        singular = name = "sterling"
    # The plural of a unit whose case matters comes first: 5 Mbs are megabits.
    meaning = _UNITS.get(name) or _UNITS.get(_make_singular(name)) or (_UNITS.get(singular) if len(name) > 1 else None)
    # V, A and K are units only inside \\text{}; elsewhere they are variables.
    if meaning is None and len(name) == 1:
        meaning = _UNITS.get(f"text {name}")
        # Without \\text{}, 5 V are volts if the gold answer is in volts.
        if meaning is not None and not is_text and not (unit_words and set(meaning[1]) <= set(unit_words)):
            meaning = None
    if meaning is not None:
        return meaning
    is_word = re.fullmatch(r"[A-Za-zµ]{2,}", name) is not None
    is_counted = singular in _COUNTED
    if not is_word or not (is_counted or unit_words is None or singular in unit_words) or is_number_word(name):
        return None
    return Fraction(1), {singular: 1}


def is_number_word(word: str) -> bool:
    """Return whether a word changes the number before it, or makes it part of a formula."""
    word = word.lower()
    return word in _NOT_A_UNIT or _make_singular(word) in _NOT_A_UNIT or word in FRACTION_WORDS


_WRAPPED = re.compile(r"\\(?:text|mathrm|textrm|mbox|textit|textbf|operatorname)\s*\{([^{}]*)\}")
_NAME = r"(?:\\(?:text|mathrm)\s*\{[^{}]*\}|[A-Za-z]+)(?:\s*\^\s*\d)?"
_FRACTION = re.compile(rf"\\frac\s*\{{\s*({_NAME})\s*\}}\s*\{{\s*({_NAME})\s*\}}")
_UNIT_PART = re.compile(
    r"\s*(?:(?P<over>/|\bper\b)|(?P<power>(?:square|cubic|sq|cu)\b)\.?|(?P<word>[A-Za-zµ°¢%€£¥₹]+)\.?)"
    r"(?P<exponent>\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d)|[²³]|\s+squared\b|\s+cubed\b)?(?:\s|\\,|\\cdot|~)*"
)


_POWER_WORDS = {"squared": "2", "cubed": "3"}


_SPELLINGS = tuple(
    (re.compile(spelling), word)
    for spelling, word in (
        (r"\\Omega(?![A-Za-z])|Ω", " ohm "),
        (r"\\mu(?![A-Za-z])\s*", "µ"),
        (r"\bper\s+cent\b", "percent"),
        (r"(?<=[A-Za-z])-(?=[A-Za-z])", " "),
        (r"µ\s+(?=[A-Za-z])", "µ"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?\b|°", " degree "),
        (r"degree\s+F\b", "fahrenheit"),
        (r"degree\s+C\b", "celsius"),
    )
)
_OUTER_SPACES = re.compile(r"^(?:\s|\\,|\\ |~)+|\s+$")


def _split_unit_words(text: str) -> Iterator[tuple[str | None, int]]:
    """Yield (word, exponent) for each word of a unit. A word None: the text is not a unit."""
    text = _FRACTION.sub(r"\1/\2", text)
    text = _WRAPPED.sub(r" \1 ", text.replace("\\%", "%").replace("\\$", "dollar"))
    text = text.replace("(s)", "s")
    for spelling, word in _SPELLINGS:
        text = spelling.sub(word, text)
    text = _OUTER_SPACES.sub("", text.replace("\\ ", " "))
    position = 0
    # `sign` is the exponent's sign (-1 after "per" or /), `leading_power` the power of a leading "square" or "cubic".
    sign, leading_power = 1, 1
    while position < len(text):
        part = _UNIT_PART.match(text, position)
        if part is None or part.end() == position:
            yield None, 1
            return
        position = part.end()
        if part["over"]:
            sign = -1
        elif part["power"]:
            leading_power = 2 if part["power"].startswith("s") else 3
        else:
            exponent = (part["exponent"] or "1").strip()
            word_power = _POWER_WORDS.get(exponent) or exponent.translate(str.maketrans("²³", "23", "^{} "))
            yield part["word"], sign * leading_power * int(word_power)
            leading_power = 1


def _make_singular(word: str) -> str:
    for plural, singular in _PLURALS:
        if word.endswith(plural):
            return word.removesuffix(plural) + singular
    return word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word


_PLURALS = (
    ("feet", "foot"), ("people", "person"), ("men", "man"), ("children", "child"), ("dice", "die"),
    ("halves", "half"), ("knives", "knife"), ("vertices", "vertex"), ("hertz", "hertz"),
    ("xes", "x"), ("sses", "ss"), ("shes", "sh"), ("ches", "ch"), ("ies", "y"),
    # The plural of `cache` ends like that of `beach`, so both lose the e.
    ("xe", "x"), ("sse", "ss"), ("she", "sh"), ("che", "ch"),
)  # fmt: skip
_ORDINAL_ENDINGS = {"st", "nd", "rd", "th"}
_ANY_UNIT = "unit"
_ANY_UNITS = {"unit", "units"}
FRACTION_WORDS = {
    word + ending: Fraction(1, under)
    for under, word in {
        3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 9: "ninth", 10: "tenth",
        11: "eleventh", 12: "twelfth", 16: "sixteenth", 20: "twentieth", 100: "hundredth", 1000: "thousandth",
        10**6: "millionth",
    }.items()
    for ending in ("", "s")
} | {
    "half": Fraction(1, 2), "halves": Fraction(1, 2), "quarter": Fraction(1, 4), "quarters": Fraction(1, 4),
}  # fmt: skip
"""Words that make a fraction with the whole number before them: 2 fifths."""
MULTIPLES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
"""Words that multiply the number before them: 3 million."""
_NOT_A_UNIT = set(MULTIPLES) | set(
    """
    and or no not half third quarter plus minus times time over to by less least more most than about approximately
    if is are the an a at only between from for with without except divided modulo mod remainder choose squared
    cubed of factorial double triple twice thrice maybe perhaps possibly probably roughly around nearly almost
    exactly ish some each every other others either neither both nor but else unless until while when where which
    that this these those it its be was were will would can could may might must should do does did then so as in on
    into onto off up down out below above under within per percent pct percentage point prime negative positive root
    sqrt power powers exponent exp log ln sin cos tan pi infinity infinite equal equals greater smaller larger fewer
    additional extra left remaining minimum maximum max min average mean total sum product difference quotient ratio
    inclusive exclusive once score gross googol zero one two three four five six seven eight nine ten eleven twelve
    thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty
    ninety quadrillion quintillion hundredfold fold tuple recurring repeating repeated am pm january february march
    april june july august september october november december jan feb mar apr jun jul aug sep sept oct nov dec
    """.split()  # noqa: SIM905
)
"""Words after a number that are not units: they change the number (half), or belong to a sentence."""
_COUNTED = set(
    """
    apple orange pear banana egg cookie cake pie pizza slice candy chocolate cupcake muffin donut doughnut bagel
    loaf bread sandwich marble ball balloon toy doll block card coin stamp sticker pen pencil crayon book page
    chapter notebook magazine letter word sentence problem question answer solution way student teacher person man
    woman boy girl child kid friend player worker employee customer guest passenger adult family team class group
    pair set piece part item object thing box bag basket bottle can jar cup plate bowl pack packet package carton
    crate bucket tank car bus truck train bike bicycle wheel tire boat plane house room floor window door table
    chair desk shelf tree plant flower rose leaf seed bush vegetable tomato potato carrot onion pepper pumpkin melon
    lemon lime peach plum cherry grape berry strawberry dog cat puppy kitten cow horse sheep pig chicken duck hen
    bird fish rabbit goat animal pet bee ant spider point goal game round match win vote ticket seat row column
    shirt pant short sock shoe hat dress jacket ring bead necklace bracelet button ribbon rope stick stone rock
    brick tile nail clip photo picture song movie show video message call email lap mile step trip visit night shift
    lesson meeting party present gift prize star planet side edge face vertex diagonal triangle square rectangle
    circle cube digit number integer factor divisor prime term root arrangement combination permutation outcome path
    route function subset sequence soldier sailor molecule atom electron proton cell
    """.split()  # noqa: SIM905
) - {"prime", "mile", "square", "point", "pair", "can", "cup"} | {"pair", "point"}
"""Singular words for counted things, like apple. Every answer may use them as units."""

_LENGTH, _TIME, _MASS, _VOLUME = {"metre": 1}, {"second": 1}, {"gram": 1}, {"metre": 3}
_LITRE = Fraction(1, 1000)
_GALLON = Fraction("0.003785411784")
_POUND = Fraction("453.59237")
_UNITS: dict[str, tuple[Fraction, dict[str, int]]] = {
    name.replace("=", " "): (Fraction(factor), dimensions)
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
        ("sterling £ GBP", 1, {"sterling": 1}),
        ("yen ¥ JPY", 1, {"yen": 1}),
        ("rupee ₹ INR", 1, {"rupee": 1}),
        ("degree deg", 1, {"degree": 1}),
        ("radian rad", 1, {"radian": 1}),
        ("celsius", 1, {"celsius": 1}),
        ("fahrenheit", 1, {"fahrenheit": 1}),
        ("N newton", 1000, {"gram": 1, "metre": 1, "second": -2}),
        ("J joule", 1000, {"gram": 1, "metre": 2, "second": -2}),
        ("kJ kilojoule", 10**6, {"gram": 1, "metre": 2, "second": -2}),
        ("W watt", 1000, {"gram": 1, "metre": 2, "second": -3}),
        ("kW kilowatt", 10**6, {"gram": 1, "metre": 2, "second": -3}),
        ("Pa pascal", 1000, {"gram": 1, "metre": -1, "second": -2}),
        ("kPa kilopascal", 10**6, {"gram": 1, "metre": -1, "second": -2}),
        ("Hz hertz", 1, {"second": -1}),
        ("mol mole", 1, {"mole": 1}),
        ("volt", 1, {"volt": 1}),
        ("text=V", 1, {"volt": 1}),
        ("ampere amp", 1, {"ampere": 1}),
        ("text=A", 1, {"ampere": 1}),
        ("ohm", 1, {"ohm": 1}),
        ("kelvin", 1, {"kelvin": 1}),
        ("text=K", 1, {"kelvin": 1}),
        ("acre", 1, {"acre": 1}),
        ("ha hectare", 10_000, {"metre": 2}),
        ("nm nanometer nanometre", "1e-9", _LENGTH),
        ("µm micrometer micrometre micron", "1e-6", _LENGTH),
        ("cc", _LITRE / 1000, _VOLUME),
        ("kWh", 3_600_000_000, {"gram": 1, "metre": 2, "second": -2}),
        ("eV electronvolt", 1, {"electronvolt": 1}),
        ("cal calorie", 1, {"calorie": 1}),
        ("kcal kilocalorie", 1000, {"calorie": 1}),
        ("atm atmosphere", 1, {"atmosphere": 1}),
        ("dB decibel", 1, {"decibel": 1}),
        ("rev revolution", 1, {"revolution": 1}),
        ("rpm", Fraction(1, 60), {"revolution": 1, "second": -1}),
        ("tesla", 1, {"tesla": 1}),
        ("text=T", 1, {"tesla": 1}),
        ("coulomb", 1, {"coulomb": 1}),
        ("text=C", 1, {"coulomb": 1}),
        ("ton tonne", 10**6, _MASS),
        ("kph kmh", Fraction(1000, 3600), {"metre": 1, "second": -1}),
        ("percent % pct percentage", "0.01", {}),
    )
    for name in names.split()
}
_PREFIXES = {"m": ("milli", Fraction(1, 1000)), "M": ("mega", Fraction(10**6)), "G": ("giga", Fraction(10**9))}
# The case of a prefix matters: mW is no MW. Other units are read in any case. In everyday texts mhz is MHz, mb is MB.
_UNITS |= {
    name: (factor * _UNITS[symbol][0], _UNITS[symbol][1])
    for symbol, word in {"W": "watt", "J": "joule", "Pa": "pascal", "Hz": "hertz", "g": "gram", "m": "metre"}.items()
    for prefix, (prefix_word, factor) in _PREFIXES.items()
    for spelling in ({symbol, symbol.upper(), symbol.lower()} if len(symbol) == 2 and prefix != "m" else {symbol})
    for name in (prefix + spelling, prefix_word + word)
    if name not in _UNITS and prefix + symbol not in ("Gg", "Gm")
} | {
    prefix + symbol.lower(): (factor * _UNITS[symbol][0], _UNITS[symbol][1])
    for prefix, factor in (("k", 10**3), ("m", 10**6), ("g", 10**9))
    for symbol in ("Hz", "Pa")
} | {
    "kHz": (Fraction(1000), {"second": -1}),
} | {
    name: (Fraction(1), dimensions)
    for names, dimensions in (
        ("kB KB kb kilobyte", {"kilobyte": 1}), ("MB mb megabyte", {"megabyte": 1}),
        ("GB gb gigabyte", {"gigabyte": 1}), ("Kb kbit kilobit", {"kilobit": 1}),
        ("Mb Mbit mbit megabit", {"megabit": 1}),
        ("Gb Gbit gbit gigabit", {"gigabit": 1}), ("kBps KBps", {"kilobyte": 1, "second": -1}),
        ("MBps", {"megabyte": 1, "second": -1}), ("GBps", {"gigabyte": 1, "second": -1}),
        ("kbps Kbps", {"kilobit": 1, "second": -1}), ("Mbps mbps", {"megabit": 1, "second": -1}),
        ("Gbps gbps", {"gigabit": 1, "second": -1}),
        ("mV millivolt", {"millivolt": 1}), ("MV megavolt", {"megavolt": 1}),
        ("meV", {"millielectronvolt": 1}), ("MeV", {"megaelectronvolt": 1}),
    )
    for name in names.split()
}  # fmt: skip


def unit_named(name: str) -> Unit:
    """Return the unit called `name`. Raises KeyError for an unknown name."""
    factor, dimensions = _UNITS[name]
    return Unit(factor, tuple(sorted(dimensions.items())))
