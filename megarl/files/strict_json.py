"""JSON parsers for files that others may have written. They limit the number of values, and so the memory."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Maximum nesting of objects and lists. Code that copies or writes a value recurses to the same depth."""
SMALL = 1 << 16
"""Maximum JSON values in a small file, such as config.json or status.json. Usual files have a few thousand.

A limit on bytes would not be enough: parsed by Python, 16 MiB of empty lists take 400 MiB.
"""
MEDIUM = 1 << 20
"""Maximum JSON values in a line of a JSON Lines file, a checkpoint's index or a manifest.

The index lists all tensors of a model, the manifest all files of a folder.
"""
LARGE = 1 << 22
"""Maximum JSON values in tokenizer.json. With 262,144 tokens and their merges it has about 2 million."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A JSON string. Possessive quantifiers (`*+`) and the optional end keep the search linear in broken texts."""
_STRING_OR_NUMBER = re.compile(rf"{_STRING.pattern.decode()}|\d+(?:[.eE][\d.eE+-]*)?", re.DOTALL)


class RepeatedKeyError(ValueError):
    """Raised for a JSON object with two values under one key."""


class RoundedNumber(float):
    """A JSON number with more digits than a float keeps."""

    __slots__ = ()


def count_values(content: bytes) -> int:
    """Return an upper bound of the values in a JSON text: commas and opening brackets, also inside strings."""
    # 20 ms for 32 MiB. The first value has no comma before it.
    return 1 + _count_separators(content)


def _count_separators(content: bytes) -> int:
    return content.count(b",") + content.count(b"[") + content.count(b"{")


def loads(content: bytes, max_values: int | None = SMALL) -> Any:
    """Return the value of a JSON text, as Python's `json` reads it.

    Raises ValueError if it is malformed, nested too deeply for Python, or has more than `max_values` values (None: any
    number).
    """
    if max_values is not None:
        refuse_many_values(content, max_values)
    try:
        # Decode here: json would accept UTF-16 too, where values cannot be counted.
        return json.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse(content: bytes, max_values: int | None = SMALL) -> Any:
    """Return the value of a JSON text in UTF-8. Raises ValueError with a message on one line.

    Also refuses what Python's `json` accepts: repeated keys, NaN and infinite numbers, lone surrogates (UTF-8 cannot
    encode them), nesting deeper than MAX_DEPTH, and more than `max_values` values (None: any number).
    """
    if max_values is not None:
        refuse_many_values(content, max_values)
    try:
        # Editors on Windows begin files with a byte-order mark.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not valid UTF-8") from None
    try:
        value = json.loads(
            text, object_pairs_hook=make_object, parse_constant=_refuse_constant, parse_float=_parse_finite_number
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        if not is_long_integer(error):
            raise
        raise ValueError(_long_integer_fault(text)) from None
    # Skip the slow checks where they cannot fail: most texts have few brackets and no escaped surrogate.
    if text.count("[") + text.count("{") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if "\\ud" in text or "\\uD" in text:
        refuse_surrogates(value)
    return value


def is_long_integer(error: ValueError) -> bool:
    """Return whether `json` refused an integer with too many digits. The error has no class of its own."""
    return "integer string conversion" in str(error)


def shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def shown(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False, default=repr))


def refuse_many_values(content: bytes, max_values: int) -> None:
    # Texts and programs have many commas. If needed, count values outside strings only, at 1 us per string.
    if count_values(content) > max_values and _has_more_outside_strings(content, max_values):
        raise ValueError(f"it has more than {max_values} values")


def _has_more_outside_strings(content: bytes, max_values: int) -> bool:
    """Return whether a JSON text has more values than allowed, with separators inside strings not counted."""
    num_values, string_end = 1, 0
    for match in _STRING.finditer(content):
        num_values += _count_separators(content[string_end : match.start()])
        string_end = match.end()
        if num_values > max_values:
            return True
    return num_values + _count_separators(content[string_end:]) > max_values


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for Python's `json`. Raises RepeatedKeyError: its own hook keeps the last value in
    silence.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated_key = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RepeatedKeyError(f"the key {shortened(json.dumps(repeated_key))} occurs twice")
    return fields


def finite_number(value: object) -> float | None:
    """Return a number among parsed values, such as a reward, as a float. None: it is not a finite number."""
    # JSON's true becomes a bool, which Python counts as an int.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON's integers have no bound
        return None
    return number if math.isfinite(number) else None


def _long_integer_fault(text: str) -> str:
    """Return the error for a JSON text with an integer of too many digits for Python: which one, and where."""
    limit = sys.get_int_max_str_digits()
    integers = (integer for integer in _STRING_OR_NUMBER.finditer(text) if integer.group().isdecimal())
    integer = next((integer for integer in integers if len(integer.group()) > limit), None)
    if integer is None:  # The parser met such an integer, but the text is no valid JSON elsewhere.
        return f"an integer has more than {limit} digits; write it as a text, in quotes"
    line, column = text.count("\n", 0, integer.start()) + 1, integer.start() - text.rfind("\n", 0, integer.start())
    return (
        f"the integer {shortened(integer.group())} in {f'line {line}, ' if line > 1 else ''}column {column} has "
        f"{len(integer.group())} digits, the limit is {limit}; write it as a text, in quotes"
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _parse_finite_number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {shortened(text)} is too large")
    # A float keeps all numbers of 15 digits. The shortest texts of floats have up to 17, and pass the comparison.
    if len(text) > 15:
        try:
            is_exact = Decimal(text) == Decimal(repr(number))
        # The exponent is beyond the limits of Decimal.
        except InvalidOperation:
            is_exact = False
        if not is_exact:
            return RoundedNumber(number)
    return number


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested more than `levels` deep."""
    # Level by level: recursion could overflow on the very values to detect.
    values_of_level = [value]
    for _ in range(levels):
        values_of_level = [
            inner_value
            for item in values_of_level
            if isinstance(item, dict | list)
            for inner_value in (item.values() if isinstance(item, dict) else item)
        ]
        if not values_of_level:
            return False
    return any(isinstance(item, dict | list) for item in values_of_level)


def refuse_surrogates(value: Any) -> None:
    """Raise ValueError if a JSON value has half of a surrogate pair: UTF-8 cannot encode it."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = ord(error.object[error.start])
        raise ValueError(f"\\u{surrogate:04x} is half of a surrogate pair, not a character") from None
