"""Reading of YAML files that others may have written: never an error, never more work than the file's size."""

from __future__ import annotations

from typing import Any

MAX_CHARACTERS = 4 << 20
"""Longest text that is parsed: 4 MiB. A run's config.yaml has some kilobytes."""


def read_mapping(content: bytes) -> dict[str, Any]:
    """Return the mapping in a YAML text, {} if it is anything else or not readable.

    Texts with aliases are not readable: a few bytes of nested aliases stand for billions of values.
    """
    # Imported here: few commands read YAML.
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases are not read")
            return super().compose_node(parent, index)

    if len(content) > MAX_CHARACTERS:
        return {}
    try:
        value = yaml.load(content, Loader=Loader)
    # Constructors of dates and numbers raise ValueError, deep nesting raises RecursionError.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return {}
    return {str(name): inside for name, inside in value.items()} if isinstance(value, dict) else {}
