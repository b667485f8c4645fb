"""Reads driver.json, the driver's state in a checkpoint, and checks its fields: it may come from a stranger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megarl.config import Recipe, RolloutConfig
from megarl.config.sections.learning import LoraConfig
from megarl.files.model_folder import read_object
from megarl.tracking.run_record import DRIVER
from megarl.tracking.spikes import is_memory
from megarl.types import DataError

DRAW_FIELDS = ("stragglers", "placement", "max_staleness")
"""Fields of `rollout` that decide whether single prompts or batches are drawn."""


def read_driver(checkpoint: Path) -> dict[str, Any]:
    """Return the driver's state in a checkpoint (driver.json). Raises DataError naming the file if it is damaged."""
    path = checkpoint / DRIVER
    driver = read_object(path)
    wrong_fields = [name for name, is_valid in _DRIVER_FIELDS.items() if name in driver and not is_valid(driver[name])]
    if wrong_fields or not driver.get("recipe"):
        raise DataError(
            f"{path}: the field {(wrong_fields or ['recipe'])[0]} is missing or damaged. Remove this checkpoint, and "
            "resume from an older one."
        )
    return driver


def saved_value(recipe: Mapping[str, Any], field: str) -> Any:
    """Return the value of a dotted field in a recipe in JSON values, or None if it is not written there."""
    value: Any = recipe
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def written_value(value: object) -> str:
    """Return a field's value as it is written in a recipe: null, true, 0.5."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def adapters_of(recipe: Mapping[str, Any]) -> LoraConfig:
    return LoraConfig.model_validate(recipe.get("lora") or {})


def draw_settings(recipe: Mapping[str, Any]) -> RolloutConfig:
    """Return a plain recipe's fields that decide how prompts are drawn. Raises ValueError for impossible values."""
    values = {name: saved_value(recipe, f"rollout.{name}") for name in DRAW_FIELDS}
    return RolloutConfig.model_validate({name: value for name, value in values.items() if value is not None})


def _is_recipe(value: Any) -> bool:
    """Return whether a value is a recipe in JSON values, as far as a resume reads it."""
    if not isinstance(value, dict) or not isinstance(value.get("loop"), str | None):
        return False
    sections = (value.get(name) for name, field in Recipe.model_fields.items() if _is_section(field.annotation))
    if not all(isinstance(section, dict | None) for section in sections):
        return False
    try:
        draw_settings(value)
        adapters_of(value)
    except ValueError:
        return False
    sizes = (saved_value(value, name) for name in ("train.prompts_per_step", "algorithm.ptx_conversations"))
    return all(size is None or (type(size) is int and size > 0) for size in sizes)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _are_counts(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(type(n) is int and n >= 0 for n in value.values()))


_DRIVER_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "recipe": _is_recipe,
    "models": _are_texts,
    "data": _are_texts,
    "kept": _are_texts,
    "drafter": _are_texts,
    "frozen": _are_texts,
    "drawn": _are_counts,
    "template": lambda value: isinstance(value, str | None),
    "vocabulary": lambda value: isinstance(value, str | None),
    "checksum": lambda value: isinstance(value, str | None),
    "spikes": lambda value: value is None or is_memory(value),
    # Earlier versions logged a step after its evaluation, and saved the metrics of an interrupted one as `unlogged`.
    "unlogged": lambda value: isinstance(value, dict | None),
}
"""Checks of the fields of driver.json by name. A checkpoint may come from a stranger."""
