"""Shell completion of overrides: names of recipe fields, then values. pydantic is imported where it is used."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from megarl.config.schema import all_fields, default_removes, description, section_of

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_HELP_CHARACTERS = 60
"""Maximum length of a candidate's description: zsh and fish would wrap longer ones."""


def override_candidates(arguments: list[str], incomplete: str) -> list[tuple[str, str]]:
    """Return the candidates for an incomplete override, each with a short description.

    `trainer.t` gives `trainer.tp=`, `~trainer.t` gives `~trainer.tp`, `trainer.fp8=` its values. `arguments` has the
    earlier words of the command line. bash passes `trainer.fp8=n` as three words, two of them in `arguments`.
    """
    fields = {name: field for name, field in all_fields().items() if section_of(field) is None}
    # After an equals sign a word is a value, even if a field has the same name: `name = seed`.
    word_before, last_word = ["", "", *(arguments[:-1] if arguments[-1:] == ["="] else arguments)][-2:]
    if last_word in fields and word_before != "=":
        return [(value, "") for value in _list_values(last_word, fields[last_word])]
    name, equals, _ = incomplete.partition("=")
    if equals:
        return [(f"{name}={value}", "") for value in _list_values(name, fields[name])] if name in fields else []
    tilde = "~" if incomplete.startswith("~") else ""
    matching_fields = [name for name in fields if name.startswith(incomplete.removeprefix("~"))]
    next_names = _next_parts(matching_fields, incomplete.removeprefix("~"))
    # A section alone is expanded to its fields: otherwise the shell would end the word after the dot.
    while len(next_names) == 1 and next_names[0].endswith("."):
        next_names = _next_parts(matching_fields, next_names[0])
    candidates = [
        (f"{tilde}{next_name}{'' if tilde or next_name.endswith('.') else '='}", _help_text(next_name))
        for next_name in next_names
    ]
    if len(next_names) == 1 and not tilde:
        # A second candidate keeps the shell from adding a blank after the equals sign.
        candidates += [(f"{next_names[0]}={value}", "") for value in _list_values(next_names[0], fields[next_names[0]])]
    return candidates


def _next_parts(names: Sequence[str], begun: str) -> list[str]:
    """Return the names up to the next dot after `begun`, without repetitions: `trainer.` for all its fields."""
    ends = (name.find(".", len(begun)) for name in names)
    return list(dict.fromkeys(name[: end + 1] if end >= 0 else name for name, end in zip(names, ends, strict=True)))


def _help_text(head: str) -> str:
    return textwrap.shorten(description(all_fields()[head.rstrip(".")]), _HELP_CHARACTERS, placeholder="...")


def _list_values(name: str, field: FieldInfo) -> list[str]:
    """Return the candidates for a field's value: its choices or default, and `default` if that removes it."""
    default = field.default
    choices = list(dict.fromkeys(_list_finite_values(field.annotation)))
    if not choices and isinstance(default, int | float | str):
        choices = [default if isinstance(default, str) else json.dumps(default)]
    return [*choices, *(["default"] if default_removes(name) else [])]


def _list_finite_values(annotation: Any) -> Iterator[str]:
    """Yield the values of a finite type: true and false, or the words of a Literal."""
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from _list_finite_values(part)
