"""Fields of the recipe by dotted name: in sections, in items of lists of sections, in sources of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from megarl.config.section import Section


@cache
def all_fields() -> dict[str, FieldInfo]:
    """Every field of the recipe by dotted name, sections included, items of lists not."""
    from megarl.config import Recipe

    return dict(_fields(Recipe, ""))


def _fields(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if (inner := section_of(field)) is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field is, if it is one."""
    return _as_section(field.annotation)


def _as_section(kind: Any) -> type[Section] | None:
    from megarl.config.section import Section

    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def recipe_field(place: str) -> str:
    """The dotted name of a field; the recipe's own field for one that a source of a mixture has for itself."""
    parts = place.split(".")
    return ".".join(parts[2:]) if parts[0] == "mixture" and len(parts) > 3 else place


def section_at(place: str) -> type[Section] | None:
    """The section with this dotted name: `optimizer`, `reward.functions.0`, `mixture.NAME`; `` is the recipe."""
    from megarl.config import Recipe

    section: type[Section] = Recipe
    parts = iter(recipe_field(place).split(".") if place else ())
    for part in parts:
        field = section.model_fields.get(part)
        if field is None:
            return None
        inner = section_of(field) or _among(field, (Union, UnionType))
        if inner is None and next(parts, None) is not None:  # the number of an item, or the name of an entry
            inner = _among(field, (tuple, dict))
        if inner is None:
            return None
        section = inner
    return section


def _among(field: FieldInfo, origins: tuple[Any, ...]) -> type[Section] | None:
    """The section among the arguments of a field's type, where that is a union, or a list or mapping of sections."""
    arguments = get_args(field.annotation) if get_origin(field.annotation) in origins else ()
    return next((section for kind in arguments if (section := _as_section(kind))), None)


def field_at(place: str) -> FieldInfo | None:
    """The field with this dotted name; None for what is not a field, such as a key of `rollout.vllm`."""
    parent, _, name = recipe_field(place).rpartition(".")
    section = section_at(parent)
    return None if section is None else section.model_fields.get(name)


def description(field: FieldInfo) -> str:
    """The text under a field, as one line."""
    return " ".join((field.description or "").split())


_DEFAULT_IS_A_VALUE = ("data.system_prompt",)
"""Fields that `FIELD=default` sets, since they take this text; `~FIELD` removes them."""


def default_removes(place: str) -> bool:
    """Whether the override `PLACE=default` removes a value: that of a field, not of a name inside one."""
    field = field_at(place)
    return field is not None and not field.is_required() and recipe_field(place) not in _DEFAULT_IS_A_VALUE


def removal(place: str) -> str:
    """The override that removes a value."""
    return f"{place}=default" if default_removes(place) else f"~{place}"
