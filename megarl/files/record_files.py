"""Reads files of recorded runs and evaluations. A missing, broken or too large file counts as empty.

Anybody may have written them, so contents are counted before they are parsed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.files.plain_yaml import read_mapping
from megarl.files.strict_json import MEDIUM, SMALL, loads


def read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def parsed_value(content: bytes, max_values: int = SMALL) -> Any:
    """Return the value of a JSON text; None: invalid, or more than `max_values` values."""
    try:
        return loads(content, max_values)
    except ValueError:
        return None


def parsed_object(content: bytes | None, max_values: int = SMALL) -> dict[str, Any]:
    value = parsed_value(content or b"{}", max_values)
    return value if isinstance(value, dict) else {}


def object_or_empty(path: Path, max_values: int = SMALL) -> dict[str, Any]:
    try:
        return parsed_object(path.read_bytes(), max_values)
    except OSError:
        return {}


def mapping_or_empty(path: Path) -> dict[str, Any]:
    try:
        return read_mapping(path.read_bytes())
    except OSError:
        return {}


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among the lines of a file. Other lines are skipped."""
    with path.open("rb") as file:
        for line in file:
            if isinstance(value := parsed_value(line, MEDIUM), dict):
                yield value


def names_in(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError):
        return ()


def list_numbered(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """Return (number, path) of a folder's entries whose names match `pattern`, in order of its group, the number."""
    matches = [(re.fullmatch(pattern, name), name) for name in names_in(folder)]
    return sorted((int(match[1]), folder / name) for match, name in matches if match)
