"""Reading and printing of recipes: a YAML file, command-line overrides, one message with all errors.

OmegaConf and pydantic are imported where they are used, so that `megarl --help` is fast.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.hints.foreign import REMOVED
from megarl.config.reading.explaining import error_page, leaves_of, plain_value, printable
from megarl.config.reading.merging import merge
from megarl.config.reading.validating import validate_values
from megarl.config.schema import description, section_of, value_at
from megarl.types import ConfigError

if TYPE_CHECKING:
    from megarl.config import Recipe, Section
    from megarl.config.secrets import Place


@dataclass(frozen=True, slots=True)
class Draft:
    """A recipe without its wrong values, together with its errors."""

    path: Path
    recipe: Recipe
    """Recipe without unknown keys. Fields in `unread` have their default values."""
    problems: tuple[str, ...]
    """Errors: one line each, with field, value, error and remedy."""
    unread: frozenset[str]
    """Dotted names of fields with a missing or unreadable value."""

    def error(self, further: Sequence[str] = ()) -> ConfigError:
        notices = [f"\n  notice: {notice}" for notice in self.recipe.notices]
        return ConfigError(error_page(self.path, [*self.problems, *further]) + "".join(notices))


def load(path: str | Path, overrides: Sequence[str] = (), *, is_of_run: bool = False) -> Recipe:
    """Read a recipe from a YAML file and apply overrides: `section.field=value` sets, `~section.field` removes a value.

    Values may refer to each other (`${model.path}`) and to the environment (`${oc.env:HOME}`); `Recipe.references` has
    references to the environment as written. A value `???` must be overridden. If an override leaves a value of the
    file without effect, the value is dropped with a notice (`Recipe.notices`). `is_of_run`: the file is the config.yaml
    of a run folder.

    Raises one ConfigError with all errors, among them secrets in clear text and fields without effect.
    """
    draft = read(path, overrides, is_of_run=is_of_run)
    if draft.problems:
        raise draft.error()
    return draft.recipe


def load_of_run(run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the config.yaml of a run, perhaps of an earlier version."""
    return load(run / "config.yaml", overrides, is_of_run=True)


def read(path: str | Path, overrides: Sequence[str] = (), *, is_of_run: bool = False) -> Draft:
    """Read a recipe like `load`, but return its errors, so that later checks can add theirs.

    Raises ConfigError only if the file is not a YAML mapping of sections and fields.
    """
    from megarl.config.idle import Origin, drop_replaced_answers, drop_superseded, list_idle_field_errors
    from megarl.config.reading.removed import drop_removed_fields
    from megarl.config.secrets import literal_secrets

    path = Path(path)
    merged = merge(path, overrides)
    removal_notices = drop_removed_fields(merged, path, is_of_run=is_of_run)
    problems = [*merged.problems, *literal_secrets(merged.values, merged.references)]
    replacement_notices = drop_replaced_answers(merged, path)
    recipe, faults, unread = validate_values(merged.values, merged.references)
    origin = Origin(path, bool(overrides), merged.overridden, unread | merged.unread, is_of_run)
    recipe, idle_notices, missing_faults = drop_superseded(recipe, merged, origin)
    problems += [*faults, *missing_faults, *list_idle_field_errors(recipe, merged.references, origin)]
    recipe_with_notices = recipe.with_references(merged.references).with_notices(
        [*removal_notices, *replacement_notices, *idle_notices]
    )
    return Draft(path, recipe_with_notices, tuple(problems), frozenset(origin.unread))


def to_yaml(recipe: Recipe, comments: bool = False) -> str:
    """Return a recipe as YAML for `load`, with all fields that have an effect.

    Values from the environment are written as references; secrets in clear text are hidden. `comments` puts each
    field's description above it.
    """
    from megarl.config.effects import may_be_idle, unmet
    from megarl.config.idle import fields_set_by_user

    set_fields = set(fields_set_by_user(recipe))

    def has_effect(place: Place) -> bool:
        field = ".".join(map(str, place))
        return unmet(recipe, field) is None and (field in set_fields or not may_be_idle(recipe, field))

    return _write_section(recipe, (), recipe.references, has_effect, comments)


def written_value(recipe: Recipe, field: str) -> Any:
    """Return the `plain_value` of a field."""
    place, references = tuple(field.split(".")), recipe.references
    return plain_value(value_at(recipe, field), place, references)


def recipe_changes(earlier: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Return a line `field: old -> new` for each field that differs from an earlier recipe of the same run.

    `earlier` is the run folder's parsed YAML; missing fields count as defaults. `runs_folder` can differ only in
    spelling, so it is ignored.
    """
    import yaml

    from megarl.config import Recipe

    required_values = {"model": {"path": recipe.model.path}, "data": {"train": recipe.data.train}}
    defaults = Recipe.model_validate({"name": recipe.name, "loop": recipe.loop, **required_values})
    new_values = _flatten_settings(yaml.safe_load(to_yaml(recipe)))
    default_settings = _flatten_settings(defaults.model_dump(mode="json"))
    earlier_settings = {
        field: value for field, value in _flatten_settings(earlier).items() if field not in REMOVED or value is not None
    }
    earlier_values = {
        field: value for field, value in default_settings.items() if field in new_values
    } | earlier_settings
    absent_text = "(not set)"
    # dict.fromkeys keeps the order of the schema, with removed fields last.
    return [
        f"{field}: {earlier_values.get(field, absent_text)} -> {new_values.get(field, absent_text)}"
        for field in dict.fromkeys((*new_values, *earlier_values))
        if field != "runs_folder" and earlier_values.get(field, absent_text) != new_values.get(field, absent_text)
    ]


def _flatten_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {dotted_name[1:]: value for dotted_name, value in leaves_of(recipe) if value != {}}


def _write_section(
    section: Section,
    place: Place,
    references: Mapping[Place, str],
    has_effect: Callable[[Place], bool],
    comments: bool,
) -> str:
    """Return a section's fields with an effect as YAML. The arguments are as in `to_yaml`."""
    import yaml

    field_texts = []
    for name, field in type(section).model_fields.items():
        value, field_place = getattr(section, name), (*place, name)
        if section_of(field) is not None and field_place not in references:
            inner_text = _write_section(value, field_place, references, has_effect, comments)
            text = f"{name}:\n{textwrap.indent(inner_text, '  ')}" if inner_text else ""
        elif section_of(field) is not None or has_effect(field_place):
            printed_value = {name: printable(value, field_place, references)}
            # Without a large width YAML folds long values over several lines.
            text = yaml.safe_dump(printed_value, sort_keys=False, allow_unicode=True, width=10**6)
        else:
            text = ""
        if text and comments:
            text = textwrap.fill(description(field), 110, initial_indent="# ", subsequent_indent="# ") + "\n" + text
        field_texts.append(text)
    return "".join(field_texts)
