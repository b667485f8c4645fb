"""The value that a user probably meant by an invalid one: misspelt, or a value of another program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from megarl.config.formulas import formula_fields, formulas
from megarl.config.hints.foreign import VALUES
from megarl.config.schema import field_at, recipe_field
from megarl.files.nearest import nearest

BASE_RECIPE = {"name": "base", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
"""A recipe with all required fields."""


def nearest_value(place: str, value: object) -> str | None:
    """Return the valid value that the user probably meant, or None."""
    if not isinstance(value, str):
        return None
    choices = _list_valid_words(place)
    normalised_value = value.lower().replace("-", "_")
    for translation, spellings in VALUES.get(recipe_field(place), {}).items():
        if normalised_value in spellings.split() and translation in choices:
            return translation
    return nearest(value, choices)


def _list_valid_words(place: str) -> list[str]:
    """Return the words that a field accepts: its formulas (the losses of `algorithm.policy_loss`), or its Literal's
    values. `place` is the field's dotted name, also in a source of a mixture.
    """
    name = recipe_field(place)
    if name in formula_fields():
        return list(formulas(name))
    field = field_at(name) or field_at(name.rpartition(".")[0])
    return [] if field is None else list(_literal_words(field.annotation))


def _literal_words(annotation: Any) -> Iterator[str]:
    for argument in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield from [argument] if isinstance(argument, str) else []
        else:
            yield from _literal_words(argument)


def written_override(field: str, value: str | None) -> str:
    """Return the override of a field with the value of another program's option, in megarl's spelling.

    If the field does not accept the value, the override has VALUE and the accepted values.
    """
    if value is None:
        return f"{field}=VALUE"
    if (fault := _find_value_fault(field, value)) is None:
        return f"{field}={value}"
    translation = nearest_value(field, value)
    if translation is not None and _find_value_fault(field, translation) is None:
        return f"{field}={translation}"
    return f"{field}=VALUE (the value {fault})"


def _find_value_fault(field: str, value: str) -> str | None:
    """Return why a field does not accept a value as written in an override, or None."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from pydantic import ValidationError
    from yaml import YAMLError

    from megarl.config import Recipe

    place = tuple(field.split("."))
    try:
        values = OmegaConf.to_container(OmegaConf.merge(BASE_RECIPE, OmegaConf.from_dotlist([f"{field}={value}"])))
        Recipe.model_validate(values)
    except ValidationError as error:
        faults = [fault["msg"] for fault in error.errors(include_url=False) if fault["loc"][: len(place)] == place]
        return faults[0].replace("Input should be", "must be") if faults else None
    except (OmegaConfBaseException, YAMLError, TypeError, ValueError):
        return "is not valid YAML"
    return None
