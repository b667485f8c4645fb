"""Values of config.json, checked one by one. Errors name the field and its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.files.strict_json import shortened
from megarl.types import DataError

COPY_AGAIN = "Copy the model folder again."

_LARGEST_SIZE = 1 << 24
"""Largest accepted value of a size in config.json: 2**24, 64 times the largest vocabularies (2**18)."""


def size(config: Mapping[str, Any], field: str, *, null: int | None = None) -> int:
    """Return a positive integer field. `null` is the value of a null field; with `null` 0 the field may also be 0.

    Raises DataError for another value, KeyError for a missing field.
    """
    value = config[field]
    if value is None and null is not None:
        return null
    if null == 0 and value == 0:
        return 0
    # Not isinstance: True is an instance of int.
    if type(value) is not int or not 0 < value <= _LARGEST_SIZE:
        raise DataError(f"{field} is {quote(value)}; it must be a whole number from 1 to {_LARGEST_SIZE}. {COPY_AGAIN}")
    return value


def positive(config: Mapping[str, Any], field: str) -> float:
    """Return a positive number. Raises DataError for another value, KeyError for a missing field."""
    value = config[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise DataError(f"{field} is {quote(value)}; it must be a positive number. {COPY_AGAIN}")
    return float(value)


def flag(config: Mapping[str, Any], field: str) -> bool:
    """Return a boolean field; null is false. Raises DataError for another value, KeyError for a missing field."""
    value = config[field]
    if value not in (None, False, True):
        raise DataError(f"{field} is {quote(value)}; it must be true or false. {COPY_AGAIN}")
    return bool(value)


def mapping(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return an object field, empty if missing or null. Raises DataError for another value."""
    value = config.get(field) or {}
    if not isinstance(value, Mapping):
        raise DataError(f"{field} is {quote(value)}; it must be an object. {COPY_AGAIN}")
    return value


def quote(value: Any) -> str:
    return "missing" if value is None else shortened(repr(value))
