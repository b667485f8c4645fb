"""Reading and printing of recipes: a YAML file, overrides from the command line, one page of errors.

OmegaConf and pydantic are imported where they are used, so that `megarl --help` waits for neither.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.explaining import error_page, leaves_of, printable, reference_around
from megarl.config.merging import merge
from megarl.config.schema import description, section_of
from megarl.config.validating import validated
from megarl.types import ConfigError

if TYPE_CHECKING:
    from megarl.config import Recipe, Section
    from megarl.config.secrets import Place


@dataclass(frozen=True, slots=True)
class Draft:
    """A recipe as far as it can be read, and what is wrong with it."""

    path: Path
    recipe: Recipe
    """Unknown keys are left out, fields of `unread` are at their defaults."""
    problems: tuple[str, ...]
    """A line each: field, value, what is wrong, remedy."""
    unread: frozenset[str]
    """Fields whose values are missing or cannot be used, by dotted name."""

    def error(self, further: Sequence[str] = ()) -> ConfigError:
        """One page of all problems, with those that other checks have found; values that were dropped come last."""
        notices = [f"\n  notice: {notice}" for notice in self.recipe.notices]
        return ConfigError(error_page(self.path, [*self.problems, *further]) + "".join(notices))


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file with overrides on top: `section.field=value`; `~section.field` removes a value.

    Values may refer to each other (`${model.path}`) and to the environment (`${oc.env:HOME}`), which the recipe
    remembers (`Recipe.references`); `???` is a value that an override must give. A value of the file that an override
    leaves without effect is dropped, with a notice (`Recipe.notices`). Raises one ConfigError that lists all that is
    wrong; a secret in clear is, and so is a field that does nothing (`config.effects`).
    """
    draft = read(path, overrides)
    if draft.problems:
        raise draft.error()
    return draft.recipe


def read(path: str | Path, overrides: Sequence[str] = (), *, is_of_run: bool = False) -> Draft:
    """As `load`, but a recipe with faults is read on, so that whoever checks more can tell all at once.

    `is_of_run`: the file is a run's config.yaml, which has all fields; those that overrides leave without an effect are
    no faults. Raises ConfigError only for a file that is no YAML of sections and fields.
    """
    from megarl.config.idle import Given, drop_superseded, idle_lines
    from megarl.config.secrets import literal_secrets

    path = Path(path)
    merged = merge(path, overrides)
    problems = [*merged.problems, *literal_secrets(merged.values, merged.references)]
    recipe, faults, unread = validated(merged.values, merged.references)
    given = Given(path, bool(overrides), merged.overridden, unread | merged.unread, is_of_run)
    recipe, notices, missing = drop_superseded(recipe, merged, given)
    problems += [*faults, *missing, *idle_lines(recipe, merged.references, given)]
    made = recipe.with_references(merged.references).with_notices(notices)
    return Draft(path, made, tuple(problems), frozenset(given.unread))


def to_yaml(recipe: Recipe, comments: bool = False) -> str:
    """The recipe as YAML that `load` reads back: all fields that have an effect under its loop and algorithm.

    What was read from the environment stays a reference to it; a secret in clear is hidden. With `comments` each field
    comes after its description.
    """
    from megarl.config.effects import may_be_idle, unmet
    from megarl.config.idle import given_fields

    given = set(given_fields(recipe))

    def has_effect(place: Place) -> bool:
        field = ".".join(map(str, place))
        return unmet(recipe, field) is None and (field in given or not may_be_idle(recipe, field))

    return _section_yaml(recipe, (), recipe.references, has_effect, comments)


def written_value(recipe: Recipe, field: str) -> Any:
    """The value of a field, by dotted name, as it may be written: references as they stand, secrets hidden.

    Plain values, as YAML and JSON have them.
    """
    from megarl.config.effects import value_at

    place, references = tuple(field.split(".")), recipe.references
    return reference_around(place, references) or printable(value_at(recipe, field), place, references)


def recipe_changes(earlier: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """`field: old -> new` for each field whose value is not what it was in an earlier recipe, read from its YAML.

    A field that the earlier recipe does not have, since it was not known or did nothing, counts as its default. Both
    are of one run, so that another `runs_folder` is another way to write where that is.
    """
    import yaml

    from megarl.config import Recipe

    required = {"model": {"path": recipe.model.path}, "data": {"train": recipe.data.train}}
    defaults = Recipe.model_validate({"name": recipe.name, "loop": recipe.loop, **required})
    now = _settings(yaml.safe_load(to_yaml(recipe)))
    known = _settings(defaults.model_dump(mode="json"))
    before = {field: value for field, value in known.items() if field in now} | _settings(earlier)
    absent = "(not set)"
    return [
        f"{field}: {before.get(field, absent)} -> {now.get(field, absent)}"
        for field in dict.fromkeys((*now, *before))
        if field != "runs_folder" and before.get(field, absent) != now.get(field, absent)
    ]


def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe by their dotted names; a list is one value."""
    return {rest[1:]: value for rest, value in leaves_of(recipe) if value != {}}


def _section_yaml(
    section: Section,
    place: Place,
    references: Mapping[Place, str],
    has_effect: Callable[[Place], bool],
    comments: bool,
) -> str:
    import yaml

    parts = []
    for name, field in type(section).model_fields.items():
        value, own = getattr(section, name), (*place, name)
        if section_of(field) is not None and own not in references:
            inner = _section_yaml(value, own, references, has_effect, comments)
            text = f"{name}:\n{textwrap.indent(inner, '  ')}" if inner else ""
        elif section_of(field) is not None or has_effect(own):
            plain = {name: printable(value, own, references)}
            text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=10**6)
        else:
            text = ""
        if text and comments:
            text = textwrap.fill(description(field), 110, initial_indent="# ", subsequent_indent="# ") + "\n" + text
        parts.append(text)
    return "".join(parts)
