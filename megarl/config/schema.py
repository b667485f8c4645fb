"""Access to recipe fields by dotted name, also inside lists of sections and sources of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from megarl.config import Recipe
    from megarl.config.section import Section

Item = TypeVar("Item")


class DescriptionNote:
    """Base class of annotations that append a text to the description of their field."""


# Imports of the schema are inside functions, because the schema's modules import this one.
@cache
def all_fields() -> dict[str, FieldInfo]:
    """Return every recipe field by dotted name, sections too, but no list items."""
    from megarl.config import Recipe

    return dict(_list_fields(Recipe, ""))


def _list_fields(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if (inner_section := section_of(field)) is not None:
            yield from _list_fields(inner_section, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[Section] | None:
    return _as_section(field.annotation)


def _as_section(kind: Any) -> type[Section] | None:
    from megarl.config.section import Section

    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def recipe_field(place: str) -> str:
    """Return `data.train` for `mixture.NAME.data.train`."""
    parts = place.split(".")
    return ".".join(parts[2:]) if parts[0] == "mixture" and len(parts) > 3 else place


def section_at(place: str) -> type[Section] | None:
    """Return the section type at a dotted name (`optimizer`, `reward.functions.0`, `mixture.NAME`); empty: the whole
    recipe.
    """
    from megarl.config import Recipe

    section: type[Section] = Recipe
    parts = iter(recipe_field(place).split(".") if place else ())
    for part in parts:
        field = section.model_fields.get(part)
        if field is None:
            return None
        inner_section = section_of(field) or _find_section(field, (Union, UnionType))
        # `next` skips the number of an item, or the name of an entry.
        if inner_section is None and next(parts, None) is not None:
            inner_section = _find_section(field, (tuple, dict))
        if inner_section is None:
            return None
        section = inner_section
    return section


def _find_section(field: FieldInfo, origins: tuple[Any, ...]) -> type[Section] | None:
    """Return the section type inside a field's union, list or mapping type, or None."""
    arguments = get_args(field.annotation) if get_origin(field.annotation) in origins else ()
    return next((section for kind in arguments if (section := _as_section(kind))), None)


def field_at(place: str) -> FieldInfo | None:
    """Return the recipe field at a dotted name, or None, as for a key inside `rollout.vllm`."""
    parent, _, name = recipe_field(place).rpartition(".")
    section = section_at(parent)
    return None if section is None else section.model_fields.get(name)


def annotated_with(place: str, kind: type[Item]) -> list[Item]:
    field = all_fields().get(place)
    return [] if field is None else [item for item in field.metadata if isinstance(item, kind)]


def value_at(recipe: Recipe, field: str) -> Any:
    value: Any = recipe
    for part in field.split("."):
        value = getattr(value, part)
    return value


def description(field: FieldInfo) -> str:
    notes = (str(item) for item in field.metadata if isinstance(item, DescriptionNote))
    return " ".join([*(field.description or "").split(), *notes])


_DEFAULT_IS_A_VALUE = ("data.system_prompt",)
"""Fields with the ordinary value `default`: `FIELD=default` sets it, and only `~FIELD` removes the value."""


def default_removes(place: str) -> bool:
    """Return whether the override `PLACE=default` removes a value. True for fields, not for keys inside a field."""
    field = field_at(place)
    return field is not None and not field.is_required() and recipe_field(place) not in _DEFAULT_IS_A_VALUE


def removal(place: str) -> str:
    """Return the override that removes a value: `FIELD=default` or `~FIELD`."""
    return f"{place}=default" if default_removes(place) else f"~{place}"
