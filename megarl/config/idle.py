"""Idle recipe fields: set by the user, but without effect under the other fields' values.

A field of the file made idle by a command-line override is dropped with a notice. Any other idle field is an error.
`config.effects` decides which fields have an effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.config.annotations import Condition
from megarl.config.effects import unmet, unmet_in
from megarl.config.reading.explaining import plain_value, reference_around, shorten_value
from megarl.config.reading.merging import Merged, merge
from megarl.config.reading.validating import remove_value, validate_values
from megarl.config.schema import all_fields, description, removal, section_of, value_at
from megarl.config.sections.data_sets import two_answers

if TYPE_CHECKING:
    from megarl.config import Recipe, Section
    from megarl.config.secrets import Place


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a recipe's values: a file, and command-line overrides that set or remove values.

    `overridden` has the dotted names set by overrides, `unread` the names of fields without a usable value.
    `is_of_run`: the file is the config.yaml of a run folder. It lists all fields with an effect, so a field that lost
    its effect is not the user's mistake.
    """

    path: Path
    has_overrides: bool
    overridden: frozenset[str]
    unread: set[str]
    is_of_run: bool

    def by_override(self, field: str) -> bool:
        """Return whether an override sets the field, a value inside it, or a section around it."""
        return any(f"{field}.".startswith(f"{key}.") or f"{key}.".startswith(f"{field}.") for key in self.overridden)


# A dropped value can make others idle (the data of a mixture, for example), so this repeats until nothing changes.
def drop_superseded(recipe: Recipe, merged: Merged, origin: Origin) -> tuple[Recipe, list[str], list[str]]:
    """Drop values of the recipe file that lost their effect because of overrides, from `merged` too.

    Returns the recipe, one notice per reason, and errors: required values now missing, such as the data of a mixture.
    Their fields are added to `origin.unread`.
    """
    notices: list[str] = []
    faults: list[str] = []
    while superseded_fields := _find_superseded(recipe, merged.references, origin):
        dropped_fields = {field for field in superseded_fields if remove_value(merged.values, field.split("."))}
        # The file has none of these fields, so another pass would find the same ones.
        if not dropped_fields:
            break
        reasons = dict.fromkeys(reason for field, (_, reason) in superseded_fields.items() if field in dropped_fields)
        for reason in reasons:
            assignments = ", ".join(
                text
                for field, (text, field_reason) in superseded_fields.items()
                if field_reason == reason and field in dropped_fields
            )
            notices.append(f"{origin.path}: {assignments}: dropped, {reason}")
        for place in [
            place for place in merged.references if any(_is_within(place, field) for field in dropped_fields)
        ]:
            del merged.references[place]
        recipe, missing_faults, unread = validate_values(merged.values, merged.references)
        faults += missing_faults
        origin.unread.update(unread)
    return recipe, notices, faults


# Runs before validation, where two different names of the gold answer are an error.
def drop_replaced_answers(merged: Merged, path: Path) -> list[str]:
    """Drop fields.answer or answer_field of the file from `merged` if an override sets the other. Returns notices."""
    notices: list[str] = []
    for place, data_set in two_answers(merged.values):
        role_place, field_place = f"{place}.fields.answer", f"{place}.answer_field"
        if (role_place in merged.overridden) == (field_place in merged.overridden):
            continue
        replaced_field, replacing_field = (
            (field_place, role_place) if role_place in merged.overridden else (role_place, field_place)
        )
        replaced_place: Any = tuple(replaced_field.split("."))
        name = data_set["answer_field"] if replaced_field == field_place else data_set["fields"]["answer"]
        value = reference_around(replaced_place, merged.references) or name
        remove_value(merged.values, replaced_place)
        merged.references.pop(replaced_place, None)
        reason = f"replaced by {replacing_field} of the command line"
        notices.append(f"{path}: {replaced_field} = {shorten_value(value)}: dropped, {reason}")
    return notices


def _is_within(place: Place, field: str) -> bool:
    return f"{'.'.join(map(str, place))}.".startswith(f"{field}.")


# A field that is idle even without overrides is the user's mistake, and stays an error.
def _find_superseded(recipe: Recipe, references: Mapping[Place, str], origin: Origin) -> dict[str, tuple[str, str]]:
    """Return the file's fields that overrides make idle, each with its value as written and the reason."""
    superseded_fields: dict[str, tuple[str, str]] = {}
    idle_in_file: list[Idle] = []
    # An idle field of an override supersedes the file's value only if both are ways to write one setting.
    for idle in _drop_unread(idle_fields(recipe), origin.unread):
        if not origin.by_override(idle.place):
            idle_in_file.append(idle)
        elif idle.need.is_alternative and not origin.by_override(alternative := idle.need.fields[0]):
            superseded_fields[alternative] = (
                _assignment_text(recipe, alternative, alternative, references),
                f"replaced by {idle.place} of the command line",
            )
    # A field that was idle without overrides is an error of the file, not superseded.
    if origin.is_of_run or not origin.has_overrides or not idle_in_file:
        return superseded_fields
    idle_before = _idle_without_overrides(origin.path)
    for place, name, source, need in idle_in_file:
        if place not in idle_before:
            reason = f"without effect {need.state(source)}"
            superseded_fields[place] = (_assignment_text(source, name, place, references), reason)
    return superseded_fields


def _idle_without_overrides(path: Path) -> set[str]:
    merged = merge(path, ())
    recipe, _, unread = validate_values(merged.values, merged.references)
    return {idle.place for idle in _drop_unread(idle_fields(recipe), unread | merged.unread)}


def list_idle_field_errors(recipe: Recipe, references: Mapping[Place, str], origin: Origin) -> Iterator[str]:
    """Yield an error line for each idle field: its value, why it has no effect, and the remedy.

    Idle fields of a run's own config.yaml are no mistake of the user (`Origin.is_of_run`).
    """
    fields = all_fields()
    for place, name, source, need in _drop_unread(idle_fields(recipe), origin.unread):
        is_override = origin.by_override(place)
        if origin.is_of_run and not is_override:
            continue
        reason = f"does nothing {need.state(source)}"
        leave_out = "leave it out" if is_override else f"leave it out ({removal(place)} on the command line)"
        assignment = _assignment_text(source, name, place, references)
        yield f"{assignment}: {reason}; {leave_out}, or {need.remedy}. {description(fields[name])}"


def _assignment_text(recipe: Recipe, field: str, place: str, references: Mapping[Place, str]) -> str:
    """Return `field = value` for an error. Secrets are hidden; `${...}` stays unresolved."""
    field_place: Any = tuple(place.split("."))
    value = plain_value(value_at(recipe, field), field_place, references)
    return f"{place} = {shorten_value(value)}"


def fields_set_by_user(section: Section, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of fields set by file or override, not by a preset."""
    for name, field in type(section).model_fields.items():
        if name in section.model_fields_set:
            if section_of(field) is not None:
                yield from fields_set_by_user(getattr(section, name), f"{prefix}{name}.")
            else:
                yield prefix + name


class Idle(NamedTuple):
    """A field that is set without effect: its name as written and in the schema, its recipe, the unmet condition."""

    place: str
    field: str
    recipe: Recipe
    need: Condition


def idle_fields(recipe: Recipe) -> Iterator[Idle]:
    """Yield each idle field, also of a mixture's sources."""
    for field in fields_set_by_user(recipe):
        if (need := unmet(recipe, field)) is not None:
            yield Idle(field, field, recipe, need)
    for source in recipe.sources if unmet(recipe, "mixture") is None else ():
        for field in sorted(source.overridden):
            if (need := unmet_in(source.recipe, field)) is not None:
                yield Idle(source.place(field), field, source.recipe, need)


def _drop_unread(fields: Iterator[Idle], unread: set[str]) -> Iterator[Idle]:
    """Yield the idle fields with readable values and deciding fields. The others already have an error."""
    for idle in fields:
        if not any(_is_unread(field, unread) for field in (idle.place, *idle.need.fields, "loop")):
            yield idle


# A check of several fields makes their whole section unread.
def _is_unread(field: str, unread: set[str]) -> bool:
    return any(f"{field}.".startswith(f"{name}.") for name in unread)
