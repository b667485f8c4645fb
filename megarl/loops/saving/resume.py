"""Resuming a run: finds the newest valid checkpoint of the same models and data.

Everything is read and checked before the run folder is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.config import Recipe
from megarl.config.recipe import recipe_changes
from megarl.datasets.counts import RecordDigests
from megarl.loops.saving.changed_data import refuse_changed_files, refuse_other_data
from megarl.loops.saving.changed_recipe import refuse_other_inputs, refuse_unfit_state
from megarl.loops.saving.checkpointing import Survey, plain_recipe, remove_incomplete_saves, survey_checkpoints
from megarl.loops.saving.data_position import DataPosition
from megarl.loops.saving.driver_state import read_driver
from megarl.loops.saving.run_inputs import Inputs
from megarl.terminal import Console
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.run_record import checkpoint_step, refuse_other_schema

Resume = Literal["if-any", "must"]
""""must": a checkpoint is required. "if-any": without a checkpoint the run starts from the beginning."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run starts: `checkpoint`, or the beginning (None).

    `position` is that in the data. `checksum` is the policy's; None if the saving run computed none
    (weights.check_every). `spikes` is the state of the spike detector, if any. With `copied_step`, the ranks have
    copies of the state after this step in memory. Then `checkpoint` is a folder with the driver's part alone.
    """

    checkpoint: Path | None
    inputs: Inputs
    position: DataPosition
    checksum: str | None = None
    spikes: Mapping[str, Any] | None = None
    copied_step: int | None = None


def find_origin(
    recipe: Recipe, folder: RunFolder, resume: Resume | None, record_digests: RecordDigests | None = None
) -> Origin:
    """Find the checkpoint to resume from, then register a new start of the run in its folder.

    Raises ConfigError for other models, adapters, chat template or order of the data. Raises DataError for a checkpoint
    of another schema, changed training data, other `record_digests` (dropped records), or if all checkpoints are
    damaged. Raises StorageError for failed reads or writes. An error leaves the folder unchanged.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    inputs = Inputs.read(recipe, record_digests)
    if folder.dead_owner:
        _warn(console, [f"{folder.path}: taken over from a process that did not record its end: {folder.dead_owner}"])
    surveyed = survey_checkpoints(folder.earlier) if resume else Survey(None, {})
    driver_state: dict[str, Any] = {}
    position = DataPosition()
    if resume == "must":
        folder.earlier.require_checkpoint()
    if surveyed.newest_intact:
        # The schema is checked first: the other checks read fields of driver.json.
        refuse_other_schema(surveyed.newest_intact)
        driver_state = read_driver(surveyed.newest_intact)
        refuse_unfit_state(driver_state, recipe, inputs)
        position = DataPosition.from_checkpoint(checkpoint_step(surveyed.newest_intact), driver_state)
        warnings = refuse_other_data(driver_state, recipe, inputs, position)
        _warn(console, [f"checkpoint {name} is left out: {reason}" for name, reason in surveyed.damaged.items()])
        console.print(f"resuming from {surveyed.newest_intact}")
        _warn(console, warnings)
        for change in recipe_changes(driver_state["recipe"], recipe):
            console.print(f"changed since then: {change}", style="yellow")
    elif resume:
        console.print(f"{folder.path} has no checkpoint yet: starting from the beginning")
    # Begin before `clean_folder` removes incomplete saves. Otherwise the freed space could hide a full disk for now.
    num_unreadable = folder.begin(
        checkpoint_step(surveyed.newest_intact) if surveyed.newest_intact else None,
        recipe.cluster.max_restarts,
        driver_state.get("unlogged"),
    )
    if resume:
        surveyed.clean_folder(folder.checkpoints_folder)
    if num_unreadable:
        _warn(console, [f"{folder.metrics_file}: {num_unreadable} lines are not readable and are skipped"])
    return Origin(surveyed.newest_intact, inputs, position, driver_state.get("checksum"), driver_state.get("spikes"))


def begin_from_copy(origin: Origin, recipe: Recipe, folder: RunFolder) -> Origin:
    """Check that recipe and inputs are those of the run, and register a restart from copies of its state in memory.

    Incomplete saves are removed. Returns `origin` unchanged.

    Raises MegarlError if the run has started from this step too often. Raises ConfigError, DataError or StorageError as
    `find_origin` does.
    """
    # The driver's part of a copy has no driver.json, so compare with the inputs that the run began with.
    driver_state = origin.inputs.as_json() | {"recipe": plain_recipe(recipe)}
    inputs = Inputs.read(recipe, dict(origin.inputs.record_digests))
    refuse_other_inputs(driver_state, recipe, inputs)
    _warn(Console(highlight=False, soft_wrap=True, markup=False), refuse_changed_files(driver_state, recipe, inputs))
    folder.begin(origin.copied_step, recipe.cluster.max_restarts)
    # A save that the lost rank interrupted is incomplete. Do not read the checkpoints: the ranks do not load them.
    # Hashing them took 80 % of the time of a recovery.
    remove_incomplete_saves(folder.checkpoints_folder)
    return origin


def _warn(console: Console, warnings: list[str]) -> None:
    for text in warnings:
        console.print(f"warning: {text}", style="yellow")
