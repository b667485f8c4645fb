"""The recipe of plain values, as far as they can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.config.explaining import explained
from megarl.config.schema import all_fields, recipe_field, section_of

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.config.secrets import Place


def validated(values: dict[str, Any], references: Mapping[Place, str]) -> tuple[Recipe, list[str], set[str]]:
    """The recipe of plain values, what is wrong with them, and the fields that are left out for it.

    The values are changed: what is wrong is taken out, and what is missing gets its own name in angle brackets.
    """
    from pydantic import ValidationError

    from megarl.config import Recipe

    problems: list[str] = []
    unread: set[str] = set()
    while True:
        try:
            return Recipe.model_validate(values), problems, unread
        except ValidationError as error:
            for found in error.errors(include_url=False):
                lines = explained(found["type"], found["loc"], found["input"], found["msg"], references)
                problems += lines.split("\n")
                unread |= _take_out(values, found["loc"], is_unknown=found["type"] == "extra_forbidden")


def _take_out(values: dict[str, Any], loc: tuple[int | str, ...], *, is_unknown: bool) -> set[str]:
    """Remove what an error of pydantic is about, or put a name in its place where it is required; the fields' names."""
    known = all_fields()
    parts = [str(part) for part in loc]
    while not is_unknown and recipe_field(".".join(parts)) not in known:
        parts.pop()  # an item of a list, a key of a mapping, a member of a union
    name = ".".join(parts)
    if take_value(values, parts) and is_unknown:
        return set()
    while recipe_field(".".join(parts)) not in known:
        parts.pop()  # the list or mapping around it is taken out already
    name = ".".join(parts)
    if name == "mixture" and isinstance(data := values.setdefault("data", {}), dict):
        data.setdefault("train", "<data.train>")  # only sources had it
    if (field := recipe_field(name)) != name:
        if known[field].is_required():
            _put(values, parts, f"<{field}>")
        return {name}
    required = [field for field in known if field == name or field.startswith(f"{name}.")]
    required = [field for field in required if known[field].is_required() and section_of(known[field]) is None]
    for field in required:
        _put(values, field.split("."), _PLACEHOLDERS.get(field, f"<{field}>"))
    return {name, *required}


def take_value(values: Any, parts: Sequence[str]) -> bool:
    """Remove the value at a place of nested mappings and lists. False: there is none."""
    for part in parts[:-1]:
        if isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        elif isinstance(values, dict) and part in values:
            values = values[part]
        else:
            return False
    if not isinstance(values, dict) or parts[-1] not in values:
        return False
    del values[parts[-1]]
    return True


def _put(values: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        values = values.setdefault(part, {})
    values[parts[-1]] = value


_PLACEHOLDERS = {"name": "unnamed", "loop": "rl"}
"""Values of required fields that a recipe does not give, until its errors are reported."""
