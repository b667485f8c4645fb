"""Reads YAML files that others may have written: raises no error, and does no more work than the file's size needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.files.strict_json import count_values

MAX_BYTES = 1 << 20
"""Maximum bytes of a parsed text: 1 MiB. A recipe with all fields and comments has 40 KiB; long lists of files need
more.
"""
MAX_VALUES = 1 << 15
"""Maximum parsed values. PyYAML takes up to 50 us and 700 bytes for each: 2 s and 25 MiB in all."""


def count_yaml_values(content: bytes) -> int:
    """Return an upper bound of the values in a YAML text without aliases."""
    return count_values(content) + content.count(b"\n")


def is_too_large(content: bytes) -> bool:
    return len(content) > MAX_BYTES or count_yaml_values(content) > MAX_VALUES


def read_mapping(content: bytes) -> dict[str, Any]:
    """Return the mapping in a YAML text. Empty: it is not a mapping, or not readable.

    Texts with aliases are refused as unreadable: a few bytes of nested aliases stand for billions of values.
    """
    # Imported here: few commands read YAML.
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases are not read")
            return super().compose_node(parent, index)

    if is_too_large(content):
        return {}
    try:
        value = yaml.load(content, Loader=Loader)
    # Constructors of dates and numbers raise ValueError, deep nesting raises RecursionError.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return {}
    return {str(name): inside for name, inside in value.items()} if isinstance(value, dict) else {}


def flatten_sections(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of nested sections by dotted name. Lists and empty sections count as values."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            fields |= flatten_sections(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = value
    return fields
