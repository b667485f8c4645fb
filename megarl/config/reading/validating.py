"""Validates a recipe's plain values. Errors in some values do not discard the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.config.reading.explaining import explain_error
from megarl.config.schema import all_fields, recipe_field, section_of

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.config.secrets import Place


def validate_values(values: dict[str, Any], references: Mapping[Place, str]) -> tuple[Recipe, list[str], set[str]]:
    """Return the recipe made from plain values, its error lines, and the names of fields left out because of errors.

    `references` has unresolved texts such as `${model.path}` by place; error lines quote them. `values` is changed:
    wrong values are removed, missing required ones become the field's name in angle brackets.
    """
    from pydantic import ValidationError

    from megarl.config import Recipe

    problems: list[str] = []
    unread: set[str] = set()
    # Checks of several fields run only after all single fields are valid, so one pass does not find every error.
    while True:
        try:
            return Recipe.model_validate(values), problems, unread
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                lines = explain_error(fault["type"], fault["loc"], fault["input"], fault["msg"], references)
                problems += lines.split("\n")
                unread |= _remove_wrong_value(values, fault["loc"], is_unknown=fault["type"] == "extra_forbidden")


def _remove_wrong_value(values: dict[str, Any], loc: tuple[int | str, ...], *, is_unknown: bool) -> set[str]:
    """Remove the wrong value of a pydantic error, and return the fields' names.

    A missing required value gets a placeholder.
    """
    recipe_fields = all_fields()
    parts = [str(part) for part in loc]
    while not is_unknown and recipe_field(".".join(parts)) not in recipe_fields:
        parts.pop()  # skips an item of a list, a key of a mapping, a member of a union
    name = ".".join(parts)
    if remove_value(values, parts) and is_unknown:
        return set()
    while recipe_field(".".join(parts)) not in recipe_fields:
        parts.pop()  # an earlier error has removed the list or mapping around it
    name = ".".join(parts)
    if name == "mixture" and isinstance(data := values.setdefault("data", {}), dict):
        data.setdefault("train", "<data.train>")  # only sources had a data.train
    if (field := recipe_field(name)) != name:
        if recipe_fields[field].is_required():
            _put_value(values, parts, f"<{field}>")
        return {name}
    required_fields = [field for field in recipe_fields if field == name or field.startswith(f"{name}.")]
    required_fields = [
        field
        for field in required_fields
        if recipe_fields[field].is_required() and section_of(recipe_fields[field]) is None
    ]
    for field in required_fields:
        _put_value(values, field.split("."), _PLACEHOLDERS.get(field, f"<{field}>"))
    return {name, *required_fields}


def section_around(values: Any, parts: Sequence[str]) -> dict[str, Any] | None:
    """Return the mapping that contains the value at `parts` (keys and indices); None: the value is absent."""
    for part in parts[:-1]:
        if isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        elif isinstance(values, dict) and part in values:
            values = values[part]
        else:
            return None
    return values if isinstance(values, dict) and parts[-1] in values else None


def remove_value(values: Any, parts: Sequence[str]) -> bool:
    """Remove the value at `parts` (keys and indices). Returns False if it is absent."""
    section = section_around(values, parts)
    if section is None:
        return False
    del section[parts[-1]]
    return True


def _put_value(values: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        values = values.setdefault(part, {})
    values[parts[-1]] = value


# These two fields refuse a placeholder in angle brackets: name has a pattern, loop a fixed list of words.
_PLACEHOLDERS = {"name": "unnamed", "loop": "rl"}
"""Values of missing required fields, until the errors are reported."""
