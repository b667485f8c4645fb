"""Refuses a resume if the checkpoint's position in the data would mean other records.

`driver_state` is driver.json (`read_driver`): the recipe and the hashes with which the checkpoint was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import Recipe
from megarl.config.recipe import error_page
from megarl.datasets.fields import data_paths
from megarl.loops.saving.data_position import DataPosition
from megarl.loops.saving.driver_state import DRAW_FIELDS, draw_settings, saved_value, written_value
from megarl.loops.saving.run_inputs import Inputs
from megarl.types import ConfigError, DataError


def refuse_other_data(
    driver_state: Mapping[str, Any], recipe: Recipe, inputs: Inputs, position: DataPosition
) -> list[str]:
    """Raise ConfigError or DataError if the run would skip or repeat records. Return a warning per validation file."""
    _refuse_other_draws(driver_state, recipe)
    _refuse_other_order(driver_state, recipe)
    _refuse_changed_grouping(driver_state, recipe)
    _refuse_steps_of_epochs(driver_state, recipe, position)
    warnings = refuse_changed_files(driver_state, recipe, inputs)
    _refuse_other_records(driver_state, recipe, inputs)
    return warnings


def refuse_changed_files(driver_state: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> list[str]:
    """Return a warning per changed validation file. Raises DataError for a changed training file."""
    digests_before, paths = driver_state.get("data", {}), data_paths(recipe)
    changes = {
        field: f"{paths[field]}: {field} is not what the run was trained on: its sha256 is {sha256}, it was "
        f"{digests_before[field]}"
        for field, sha256 in inputs.data.items()
        if digests_before.get(field, sha256) != sha256
    }
    errors = [
        f"{text}. Restore the file, choose another name=NAME, or start over with --restart"
        for field, text in changes.items()
        if "data.validation" not in field
    ]
    if errors:
        raise DataError(error_page(f"data of recipe {recipe.name}", errors))
    return list(changes.values())


def _refuse_other_draws(driver_state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if prompts are drawn in another way than before.

    A run whose groups continue over several steps draws single prompts, other runs draw batches. Their positions in the
    data cannot be converted.
    """
    rollout_before = draw_settings(driver_state["recipe"])
    if recipe.loop != "rl" or rollout_before.carries_groups == recipe.rollout.carries_groups:
        return
    settings_before, settings = (
        rollout.model_dump(include=set(DRAW_FIELDS)) for rollout in (rollout_before, recipe.rollout)
    )
    changed_fields = [name for name in DRAW_FIELDS if settings[name] != settings_before[name]]
    fields = ", ".join(f"rollout.{name} = {written_value(settings[name])}" for name in changed_fields)
    earlier_values = " ".join(f"rollout.{name}={written_value(settings_before[name])}" for name in changed_fields)
    raise ConfigError(
        f"{fields}: the run began with {earlier_values} and cannot continue, because it counts its position in the "
        f"data differently; set {earlier_values}, choose another name=NAME, or start over with --restart"
    )


def _refuse_other_order(driver_state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if `seed` or `data.shuffle` changed: the position would mean other records."""
    recipe_before = driver_state["recipe"]
    default_shuffle_before = saved_value(recipe_before, "data.shuffle")
    default_shuffle_before = True if default_shuffle_before is None else default_shuffle_before
    values_by_field: dict[str, tuple[object, object]] = {"seed": (recipe_before.get("seed", 0), recipe.seed)}
    if not recipe.mixture or recipe.data.ptx:
        values_by_field["data.shuffle"] = default_shuffle_before, recipe.data.shuffle
    for source in recipe.sources if recipe.mixture else ():
        # A new source has no position yet.
        if source.name in (recipe_before.get("mixture") or {}):
            source_shuffle_before = saved_value(recipe_before, f"mixture.{source.name}.data.shuffle")
            value = source.recipe.data.shuffle
            values_by_field[source.place("data.shuffle")] = (
                default_shuffle_before if source_shuffle_before is None else source_shuffle_before,
                value,
            )
    errors = [
        f"{field} = {written_value(value)}: the run began with {written_value(value_before)}. Another value gives the "
        f"data another order, so records would be skipped or repeated. Set {field}={written_value(value_before)}, "
        "choose another name=NAME, or start over with --restart"
        for field, (value_before, value) in values_by_field.items()
        if value_before != value
    ]
    if errors:
        raise ConfigError(error_page(f"recipe {recipe.name}", errors))


def _refuse_changed_grouping(driver_state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if `data.curriculum.by` changed: the saved solve rates are of other groups of problems."""
    shared_curriculum = saved_value(driver_state["recipe"], "data.curriculum") or {}
    sources_before = driver_state["recipe"].get("mixture") or {}
    for source in recipe.sources:
        # A new source has no solve rates yet.
        if recipe.mixture and source.name not in sources_before:
            continue
        # A source's section may have some of the fields, and the others are those of `data`.
        source_before = saved_value(sources_before[source.name], "data.curriculum") if recipe.mixture else None
        curriculum_before, curriculum = {**shared_curriculum, **(source_before or {})}, source.recipe.data.curriculum
        # Without a band there are no solve rates.
        if (
            curriculum.band is None
            or curriculum_before.get("band") is None
            or curriculum_before.get("by") == curriculum.by
        ):
            continue
        field = source.place("data.curriculum.by")
        grouping_before, grouping = written_value(curriculum_before.get("by")), written_value(curriculum.by)
        raise ConfigError(
            f"{field} = {grouping}: the checkpoint has solve rates by {grouping_before}; set "
            f"{field}={grouping_before}, choose another name=NAME, or start over with --restart"
        )


def _refuse_steps_of_epochs(driver_state: Mapping[str, Any], recipe: Recipe, position: DataPosition) -> None:
    """Raise ConfigError if train.epochs does not match the records drawn so far.

    `train.steps` was computed as if each earlier step drew train.prompts_per_step records.
    """
    num_prompts, epochs = recipe.train.prompts_per_step, recipe.train.epochs
    if epochs is None:
        return
    num_prompts_before = saved_value(driver_state["recipe"], "train.prompts_per_step")
    num_drawn = position.drawn.get("data.train", position.step * (num_prompts_before or num_prompts))
    if num_drawn == position.step * num_prompts:
        return
    raise ConfigError(
        f"train.prompts_per_step = {num_prompts}: the run drew {num_drawn} records in its first {position.step} steps, "
        f"so train.epochs = {epochs:g} cannot be converted into steps. Give train.steps=N instead "
        "(train.epochs=null), or set "
        f"train.prompts_per_step={num_prompts_before or num_drawn // max(position.step, 1)} again"
    )


def _refuse_other_records(driver_state: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> None:
    """Raise DataError if other records than before are dropped as too long.

    The position in the data counts only the remaining records, so it would point at others.
    """
    digests_before = driver_state.get("kept", {})
    errors = [
        f"{field}: the records dropped as too long differ from those dropped when the run began (kept are {digest}; "
        f"then {digests_before[field]}), so its position in the data means other records. Restore the fields that "
        "decide this (data.overlong, data.max_prompt_tokens, trainer.max_tokens_per_microbatch, "
        "model.chat_template_kwargs, data.system_prompt, data.format, data.fields), choose another name=NAME, or start "
        "over with --restart"
        for field, digest in inputs.record_digests.items()
        if digests_before.get(field, digest) != digest
    ]
    if errors:
        raise DataError(error_page(f"data of recipe {recipe.name}", errors))
