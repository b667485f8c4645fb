"""Data mixtures: runs with several sources of prompts. A source overrides some recipe fields and shares the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue, PositiveFloat, ValidationError, model_serializer
from pydantic_core import InitErrorDetails, PydanticCustomError

from megarl.config.section import Section

if TYPE_CHECKING:
    from megarl.config import Recipe

# Sources share all other fields: they describe the ranks, the models or the batch.
OWN = {
    "data": (
        "train", "validation", "format", "fields", "answer_field", "system_prompt", "max_prompt_tokens", "overlong",
        "streaming", "shuffle", "curriculum",
    ),
    "rollout": (
        "sampling", "environment", "environment_kwargs", "tool_parser", "agent", "max_turns", "truncated_turn",
        "history", "budget",
    ),
    "reward": ("functions", "correct_score", "num_workers", "timeout_seconds", "wall_timeout_seconds"),
    "distillation": ("teacher", "teacher_prompt", "context"),
    "evaluation": ("max_problems", "samples_per_prompt", "k", "sampling"),
}  # fmt: skip
"""Recipe fields that a source may override, by recipe section."""


class SourceConfig(Section):
    """Source of prompts in a mixture. Its unset fields are the recipe's."""

    weight: PositiveFloat = 1.0
    """Weight of this source. Its share of all prompts is this weight divided by the sum over all sources."""
    data: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of `data` fields for this source: train, validation, format, fields, answer_field, system_prompt,
    max_prompt_tokens, overlong, streaming, shuffle, curriculum. All others come from the recipe's `data`."""
    rollout: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of `rollout` fields for this source: sampling, environment, environment_kwargs, tool_parser, agent,
    max_turns, truncated_turn, history, budget. All others come from the recipe's `rollout`."""
    reward: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of `reward` fields for this source: functions, correct_score, num_workers, timeout_seconds,
    wall_timeout_seconds. All others come from the recipe's `reward`."""
    distillation: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of `distillation` fields for this source: teacher, teacher_prompt, context."""
    evaluation: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of `evaluation` fields for this source: max_problems, samples_per_prompt, k, sampling. All others come
    from the recipe's `evaluation`."""

    @model_serializer
    def _short(self) -> dict[str, Any]:
        sections = {name: getattr(self, name) for name in OWN if getattr(self, name)}
        return {"weight": self.weight, **sections}


@dataclass(frozen=True, slots=True)
class SourceRecipe:
    """One source of a mixture, as a complete recipe with the source's overrides applied.

    `overridden` has the dotted names of the overridden fields. Without a mixture, the recipe is the only source, named
    after its environment.
    """

    name: str
    weight: float
    recipe: Recipe
    overridden: frozenset[str] = frozenset()

    def place(self, field: str) -> str:
        """Return a field's dotted name in the user's recipe, like mixture.NAME.data.train."""
        is_overridden = any(f"{field}.".startswith(f"{name}.") for name in self.overridden)
        return f"mixture.{self.name}.{field}" if is_overridden else field


def sources(recipe: Recipe) -> tuple[SourceRecipe, ...]:
    """Return the sources of the mixture, or the recipe itself as its only source."""
    if not recipe.mixture:
        return (SourceRecipe(recipe.rollout.environment, 1.0, recipe),)
    return tuple(_make_source(recipe, name, entry) for name, entry in recipe.mixture.items())


# Collect all errors first, so that a user sees every error of a recipe at once.
def check_sources(recipe: Recipe) -> None:
    """Raise a ValidationError with the errors of all sources, placed at mixture.NAME in the recipe."""
    faults: list[InitErrorDetails] = []
    source_by_set: dict[str, str] = {}
    # A validation set needs the environment of a source.
    if recipe.mixture and recipe.data.validation:
        text = (
            "does not belong to a source of the mixture, so its environment is unknown; move it to "
            "mixture.NAME.data.validation"
        )
        faults.append(_fault(text, ("data", "validation"), recipe.data.validation))
    for name, source_config in recipe.mixture.items():
        # A source may override only some fields, and must have valid values and its own names of sets.
        for section, permitted_fields in OWN.items():
            values: Mapping[str, Any] = getattr(source_config, section)
            for field_name in values:
                if field_name not in permitted_fields:
                    text = (
                        "cannot differ by source; set it for the whole run. A source may set "
                        f"{', '.join(permitted_fields)}"
                    )
                    faults.append(_fault(text, ("mixture", name, section, field_name), values[field_name]))
            permitted_values = {
                field_name: value for field_name, value in values.items() if field_name in permitted_fields
            }
            try:
                merged_section = _merge_section(getattr(recipe, section), permitted_values)
            except ValidationError as error:
                faults += _place_errors(error, ("mixture", name, section))
                continue
            for set_name in getattr(merged_section, "validation", ()):
                if (first_source := source_by_set.setdefault(set_name, name)) != name:
                    text = f"source {first_source} has a validation set with this name; choose another"
                    faults.append(_fault(text, ("mixture", name, "data", "validation"), set_name))
    if faults:
        raise ValidationError.from_exception_data("mixture", faults)


# data.train is required, but a recipe may have data in its sources only.
def with_train_of_first_source(values: Any) -> Any:
    """Return recipe values with the first source's data.train, if only sources have one."""
    if not isinstance(values, Mapping) or not isinstance(values.get("mixture"), Mapping):
        return values
    data = values.get("data", {})
    if not isinstance(data, Mapping) or "train" in data:
        return values
    for entry in values["mixture"].values():
        source_data = entry.get("data") if isinstance(entry, Mapping) else getattr(entry, "data", None)
        if isinstance(source_data, Mapping) and isinstance(source_data.get("train"), str):
            return {**values, "data": {**data, "train": source_data["train"]}}
    return values


def _make_source(recipe: Recipe, name: str, entry: SourceConfig) -> SourceRecipe:
    """Return the recipe of one source of the mixture: the run's recipe with the source's own fields."""
    source_sections: dict[str, Any] = {"mixture": {}}
    overridden_fields: list[str] = []
    for section in OWN:
        source_values: Mapping[str, Any] = getattr(entry, section)
        if source_values:
            source_sections[section] = _merge_section(getattr(recipe, section), source_values)
            overridden_fields += _list_overridden_fields(getattr(recipe, section), source_values, f"{section}.")
    source_recipe = recipe.model_copy(update=source_sections).with_overlong_buffer()
    return SourceRecipe(name, entry.weight, source_recipe, frozenset(overridden_fields))


def _merge_section(section: Section, changes: Mapping[str, Any]) -> Section:
    """Raises ValidationError."""
    return type(section).model_validate(_merge_values(section, changes))


# Only set fields are dumped: a default would count as set in the merged section (`config.effects`).
def _merge_values(section: Section, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section's set values with changes applied, also in nested sections."""
    values = section.model_dump(exclude_unset=True)
    for name, value in changes.items():
        current = getattr(section, name, None)
        if isinstance(current, Section) and isinstance(value, Mapping):
            value = _merge_values(current, value)
        values[name] = value
    return values


def _list_overridden_fields(section: Section, changes: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in changes.items():
        current = getattr(section, name, None)
        if isinstance(current, Section) and isinstance(value, Mapping):
            yield from _list_overridden_fields(current, value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _place_errors(error: ValidationError, place: Sequence[str]) -> list[InitErrorDetails]:
    """Return a section's pydantic errors with their places below mixture.NAME."""
    return [
        InitErrorDetails(
            type=PydanticCustomError(fault["type"], fault["msg"]),  # pyright: ignore[reportArgumentType]
            loc=(*place, *fault["loc"]),
            input=fault["input"],
        )
        for fault in error.errors(include_url=False)
    ]


def _fault(text: str, place: tuple[str, ...], value: Any) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError("mixture", text), loc=place, input=value)  # pyright: ignore
