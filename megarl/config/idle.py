"""Given fields that do nothing: those of the file that overrides leave without effect are dropped, others are errors.

`config.effects` says where each field has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.config.effects import Needs, unmet, unmet_in, value_at
from megarl.config.explaining import printable, reference_around, shortened
from megarl.config.merging import Merged, merge
from megarl.config.schema import all_fields, description, removal, section_of
from megarl.config.validating import take_value, validated

if TYPE_CHECKING:
    from megarl.config import Recipe, Section
    from megarl.config.secrets import Place


@dataclass(frozen=True, slots=True)
class Given:
    """Where a recipe's values come from: a file, and overrides that set or remove values.

    `overridden` are the values that overrides set, by dotted name; `unread` are fields without a value.
    `is_of_run`: the file is a run's config.yaml, which has all fields, so that one without effect is not the user's.
    """

    path: Path
    has_overrides: bool
    overridden: frozenset[str]
    unread: set[str]
    is_of_run: bool

    def by_override(self, field: str) -> bool:
        """Whether an override gives a field, a value in it or the section around it."""
        return any(f"{field}.".startswith(f"{key}.") or f"{key}.".startswith(f"{field}.") for key in self.overridden)


def drop_superseded(recipe: Recipe, merged: Merged, given: Given) -> tuple[Recipe, list[str], list[str]]:
    """The recipe without the file's values that overrides leave without effect, a notice for each reason, and faults.

    The values and references of `merged` are dropped there too. A fault is a value that is missing without them, such
    as the data of a mixture; its field is added to `given.unread`.
    """
    notices: list[str] = []
    faults: list[str] = []
    while found := _superseded(recipe, merged.references, given):
        dropped = {field for field in found if take_value(merged.values, field.split("."))}
        if not dropped:
            break
        reasons = dict.fromkeys(reason for field, (_, reason) in found.items() if field in dropped)
        for reason in reasons:
            shown = ", ".join(text for field, (text, own) in found.items() if own == reason and field in dropped)
            notices.append(f"{given.path}: {shown}: dropped, {reason}")
        for place in [place for place in merged.references if any(_is_within(place, field) for field in dropped)]:
            del merged.references[place]
        recipe, missing, unread = validated(merged.values, merged.references)
        faults += missing
        given.unread.update(unread)
    return recipe, notices, faults


def _is_within(place: Place, field: str) -> bool:
    return f"{'.'.join(map(str, place))}.".startswith(f"{field}.")


def _superseded(recipe: Recipe, references: Mapping[Place, str], given: Given) -> dict[str, tuple[str, str]]:
    """Fields of the file that overrides leave without effect: the value as written, and the reason."""
    found: dict[str, tuple[str, str]] = {}
    of_file: list[Idle] = []
    for idle in _readable(idle_fields(recipe), given.unread):
        if not given.by_override(idle.place):
            of_file.append(idle)
        elif idle.need.is_alternative and not given.by_override(other := idle.need.fields[0]):
            found[other] = (
                _assignment(recipe, other, other, references),
                f"replaced by {idle.place} of the command line",
            )
    if given.is_of_run or not given.has_overrides or not of_file:
        return found
    idle_before = _idle_without_overrides(given.path)
    for place, name, of_source, need in of_file:
        if place not in idle_before:
            reason = f"without effect {need.state(of_source)}"
            found[place] = (_assignment(of_source, name, place, references), reason)
    return found


def _idle_without_overrides(path: Path) -> set[str]:
    """Fields that do nothing in the file as it stands."""
    merged = merge(path, ())
    recipe, _, unread = validated(merged.values, merged.references)
    return {idle.place for idle in _readable(idle_fields(recipe), unread | merged.unread)}


def idle_lines(recipe: Recipe, references: Mapping[Place, str], given: Given) -> Iterator[str]:
    """A line for each given field that does nothing: its value, the reason and the remedy."""
    known = all_fields()
    for place, name, of_source, need in _readable(idle_fields(recipe), given.unread):
        is_override = given.by_override(place)
        if is_override or not given.is_of_run:
            reason = f"does nothing {need.state(of_source)}"
            leave_out = "leave it out" if is_override else f"leave it out ({removal(place)} on the command line)"
            shown = _assignment(of_source, name, place, references)
            yield f"{shown}: {reason}; {leave_out}, or {need.remedy}. {description(known[name])}"


def _assignment(recipe: Recipe, field: str, place: str, references: Mapping[Place, str]) -> str:
    """`field = value`, as it may be written."""
    where: Any = tuple(place.split("."))
    value = reference_around(where, references) or printable(value_at(recipe, field), where, references)
    return f"{place} = {shortened(value)}"


def given_fields(section: Section, prefix: str = "") -> Iterator[str]:
    """The fields that a recipe gives, by dotted name; not those that a preset sets."""
    for name, field in type(section).model_fields.items():
        if name in section.model_fields_set:
            if section_of(field) is not None:
                yield from given_fields(getattr(section, name), f"{prefix}{name}.")
            else:
                yield prefix + name


class Idle(NamedTuple):
    """A given field that does nothing in a recipe, a source's where it is in a mixture, and the condition."""

    place: str
    field: str
    recipe: Recipe
    need: Needs


def idle_fields(recipe: Recipe) -> Iterator[Idle]:
    """Each given field that does nothing, a source's own too."""
    for field in given_fields(recipe):
        if (need := unmet(recipe, field)) is not None:
            yield Idle(field, field, recipe, need)
    for source in recipe.sources if unmet(recipe, "mixture") is None else ():
        for field in sorted(source.own):
            if (need := unmet_in(source.recipe, field)) is not None:
                yield Idle(source.place(field), field, source.recipe, need)


def _readable(found: Iterator[Idle], unread: set[str]) -> Iterator[Idle]:
    """Those whose value, and what decides on its effect, could be read."""
    return (idle for idle in found if idle.place not in unread and not unread & {*idle.need.fields, "loop"})
