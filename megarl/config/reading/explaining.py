"""Error lines of a recipe: field, value, fault and remedy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.hints.foreign import REMOVED
from megarl.config.hints.migration import describe_replacements, meanings, short_meanings
from megarl.config.hints.value_hints import nearest_value, written_override
from megarl.config.schema import all_fields, description, field_at, recipe_field, removal, section_at, section_of
from megarl.config.secrets import HIDDEN, Place, holds_secret, secret_items, shown_key
from megarl.files.nearest import nearest


def error_page(title: str | Path, problems: Sequence[str]) -> str:
    return f"{title}: {len(problems)} error{'s' if len(problems) > 1 else ''}\n" + textwrap.indent(
        "\n".join(problems), "  "
    )


def explain_error(
    error_type: str, loc: tuple[int | str, ...], value: Any, message: str, references: Mapping[Place, str]
) -> str:
    """Return the message for a pydantic error as one or several lines.

    `error_type`: its type; `loc`: its place (keys and indices). The message quotes `references`, unresolved texts such
    as `${model.path}` by place.
    """
    is_key = loc[-1:] == ("[key]",)
    place = ".".join(str(part) for part in (loc[:-1] if is_key else loc))
    written_value = plain_value(value, loc, references)
    # Errors about a whole key.
    if error_type == "missing":
        return _explain_missing(place)
    if error_type == "extra_forbidden":
        return "\n".join(_explain_unknown(place, written_value))
    if error_type == "two_answers":
        answer = f"{place}.fields.answer"
        answer_loc = (*loc, "fields", "answer")
        name = plain_value(value["fields"]["answer"], answer_loc, references)
        return f"{answer} = {shorten_value(name)}: {message} (~{answer} on the command line)"
    # Errors about a value.
    assignment = f"{place} = {shorten_value(written_value)}"
    if error_type == "model_type":
        return f"{assignment}: is a section; leave it out or set {', '.join(_list_children(place))}"
    if is_key and error_type == "literal_error":
        keys = message.removeprefix("Input should be ").replace("'", "")
        parent = place.rpartition(".")[0]
        return f"{place}: {written_value!r} is not a key of {parent}; its keys are {keys}. {_describe_place(place)}"
    if is_key:
        return f"{place}: bad name {written_value!r}; use letters, digits, dots, dashes and underscores"
    return f"{assignment}: {_explain_value(error_type, place, value, message)}"


def _explain_missing(place: str) -> str:
    fields = all_fields()
    required_fields = [name for name, field in fields.items() if name.startswith(place + ".") and field.is_required()]
    lines = [(name, field_at(name)) for name in required_fields or [place]]
    return "\n".join(f"{name}: missing; add it: {description(field) if field else ''}" for name, field in lines)


def _list_children(place: str) -> list[str]:
    section = section_at(place)
    return [f"{place}.{name}" for name in section.model_fields] if section else []


def _explain_value(error_type: str, place: str, value: Any, message: str) -> str:
    """Return the fault of a value, the nearest valid value or the way to remove it, and the field's description."""
    # pydantic's texts become sentences about a recipe.
    sentence = message.replace("Input should be", "must be").replace("a valid tuple", "a list, such as [a, b]")
    field = field_at(place)
    if error_type in ("literal_error", "formula") and (nearest_choice := nearest_value(place, value)):
        sentence += f"; did you mean {nearest_choice!r}?"
    elif field is not None and value is None and not field.is_required():
        sentence += f"; {removal(place)} on the command line removes it."
    else:
        sentence += "."
    return f"{sentence} {_describe_place(place)}".removesuffix(". ")


def _describe_place(place: str) -> str:
    """Return the description of the field at a place, or of the section around it, or nothing."""
    parts = place.split(".")
    fields = (field_at(".".join(parts[:num_parts])) for num_parts in range(len(parts), 1, -1))
    return next((description(field) for field in fields if field is not None), "")


# A misspelt section gets one line. Another program's section gets a line per value, because remedies differ.
def _explain_unknown(place: str, value: Any) -> Iterator[str]:
    """Yield the error line of an unknown key, or one line for each value of an unknown section."""
    leaves = [(f"{place}{field_in_section}", item) for field_in_section, item in leaves_of(value)]
    is_misspelt = nearest(place.rpartition(".")[2], _list_siblings(place)) is not None
    is_foreign = any(meanings(name) for name, _ in leaves)
    is_elsewhere = not is_misspelt and any(_find_elsewhere(name) for name, _ in leaves)
    for name, item in leaves if is_foreign or is_elsewhere else [(place, value)]:
        written_value = str(item).lower() if isinstance(item, bool) else str(item)
        yield f"{name} = {shorten_value(item)}: unknown key; {key_hint(name, written_value)}"


def key_hint(place: str, value: str | None = None) -> str:
    """Return a hint for an unknown key: a similar recipe field, or the recipe field for another program's option.

    `value` is the key's value: with some values, some options mean another field.
    """
    from megarl.config.mixture import SourceConfig

    if (replacement := REMOVED.get(place)) is not None:
        return f"the field was removed: {replacement}"
    # Other sections do not have the fields of list items, so they are not searched for them.
    fields, short_names = [] if _is_in_item(place) else _find_elsewhere(place), short_meanings(place, value)
    if foreign_meanings := meanings(place, value) or ([] if fields else short_names):
        return describe_replacements(foreign_meanings)
    if place.startswith("mixture."):
        source_field = recipe_field(place)
        return (
            key_hint(source_field, value)
            if source_field != place
            else f"a source has {', '.join(SourceConfig.model_fields)}"
        )
    if fields:
        parents = [name.rpartition(".")[0] or "the top level" for name in fields]
        also_text = f"; ColossalRL's -{place}: {describe_replacements(short_names)}" if short_names else ""
        return f"it belongs under {' or '.join(parents)}: {', '.join(fields)}{also_text}"
    last_name, siblings = place.rpartition(".")[2], _list_siblings(place)
    if nearest_name := _find_nearest_field(place):
        return f"did you mean {nearest_name}?"
    return f"known are {', '.join(siblings.values())}" if siblings else f"no section has a field like {last_name}"


def _is_in_item(place: str) -> bool:
    parent = place.rpartition(".")[0]
    return parent not in {"", *all_fields()} and section_at(parent) is not None


def _find_nearest_field(place: str) -> str | None:
    """Return the recipe fields with the most similar name, as `a or b`. Fields of the same section come first."""
    last_name = place.rpartition(".")[2]
    siblings = _list_siblings(place)
    if (nearest_name := nearest(last_name, siblings)) is not None:
        return siblings[nearest_name]
    candidates = {} if _is_in_item(place) else all_fields()
    nearest_name = nearest(last_name, [name.rpartition(".")[2] for name in candidates])
    return (
        None
        if nearest_name is None
        else " or ".join(name for name in candidates if name.rpartition(".")[2] == nearest_name)
    )


def _list_siblings(place: str) -> dict[str, str]:
    """Return the fields of the section around a place: full names by last part."""
    parent = place.rpartition(".")[0]
    section = section_at(parent)
    prefix = f"{parent}." if parent else ""
    return {} if section is None else {name: f"{prefix}{name}" for name in section.model_fields}


def _find_elsewhere(place: str) -> list[str]:
    last_name = place.rpartition(".")[2]
    return [name for name in all_fields() if name.rpartition(".")[2] == last_name]


def option_hint(option: str, value: str | None, options: Sequence[str]) -> str:
    """Return the end of the error for an unknown command-line option, for example `--steps 5`.

    It explains the first that applies: an option of another program, a recipe field to override, a section, a similar
    option or field. `options`: the command's.
    """
    name, recipe_fields = option.lstrip("-").replace("-", "_"), all_fields()
    matches = [name] if name in recipe_fields else _find_elsewhere(name)
    is_recipe_field = option.startswith("--") and bool(matches)
    # An option of another training program.
    if foreign_meanings := meanings(name, value) or (
        [] if is_recipe_field else short_meanings(option.lstrip("-"), value)
    ):
        return describe_replacements(foreign_meanings, value, with_override=True)
    # A recipe field, which is written as an override without dashes.
    if fields := [field for field in matches if section_of(recipe_fields[field]) is None]:
        return f"write {' or '.join(written_override(field, value) for field in fields)}"
    if matches:
        overrides = [written_override(field, value) for field in _list_children(matches[0])]
        return f"is a section here; write {' or '.join(overrides)}"
    # A misspelt option or field.
    if nearest_name := nearest(name, [choice.lstrip("-") for choice in options]):
        return f"did you mean --{nearest_name}?"
    nearest_name = _find_nearest_field(name)
    written_value = "VALUE" if value is None else value
    return (
        f"did you mean {nearest_name}? Write it as SECTION.FIELD={written_value}"
        if nearest_name
        else "no option or field is like it"
    )


def leaves_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all values below a section by relative name, such as `.data.train`.

    If `value` is empty or not a section, its name is empty.
    """
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from ((f".{name}{inner_name}", leaf_value) for inner_name, leaf_value in leaves_of(item))
    else:
        yield "", value


def shorten_value(value: Any) -> str:
    return textwrap.shorten(repr(value), 80)


def printable(value: Any, place: Place, references: Mapping[Place, str]) -> Any:
    """Return a value for printing: secrets are hidden, and references like `${model.path}` are not resolved."""
    if place in references:
        return references[place]
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {
            shown_key(str(name)): printable(inner_value, (*place, str(name)), references)
            for name, inner_value in value.items()
        }
    if isinstance(value, list | tuple):
        hidden_indices = {index for index in secret_items(place, value) if (*place, index) not in references}
        return [
            HIDDEN if index in hidden_indices else printable(item, (*place, index), references)
            for index, item in enumerate(value)
        ]
    if isinstance(value, str):
        # `load` would resolve an unescaped ${...} as a reference.
        return HIDDEN if holds_secret(place, value) else value.replace("${", "\\${")
    return HIDDEN if holds_secret(place, value) else value


def plain_value(value: Any, place: Place, references: Mapping[Place, str]) -> Any:
    """Return a value as plain YAML or JSON. References stay unresolved, secrets are hidden."""
    return reference_around(place, references) or printable(value, place, references)


def reference_around(place: Place, references: Mapping[Place, str]) -> str | None:
    """Return the reference (`${oc.env:NAME}`) that gave a value or a section around it, or None."""
    return next((references[place[:end]] for end in range(len(place), 0, -1) if place[:end] in references), None)
