"""Driver side of checkpoints: atomic saves, verification, removal of old ones, export of the best model.

`checkpoints/step_NNNNNN/` has the trainer's state, `driver.json` and `manifest.json`, written last. RL runs add their
position in the data (`collection`). `checkpoints/latest` names the newest checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl import faults
from megarl.checkpoint.manifest import check_sizes, complete_manifest
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config import Recipe
from megarl.config.recipe import to_yaml
from megarl.files.atomic import raise_disk_full_errors, raise_storage_errors, replace_text, sync
from megarl.files.record_files import read_or_none
from megarl.loops.saving.best_model import BestModel
from megarl.loops.saving.data_position import DataPosition
from megarl.loops.saving.state_replication import StateReplication
from megarl.report.model_card import write_card
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.run_record import DRIVER, SCHEMA, RunRecord, checkpoint_step
from megarl.tracking.spikes import SpikeDetector
from megarl.tracking.tracker import Tracker
from megarl.types import DataError, DiskFullError

_LEFTOVER = re.compile(r"\.step_\d{6,}\.(partial|removed)")


class Checkpoints:
    """Saves a run's checkpoints at the steps of its recipe.

    Adds `time/checkpoint_seconds`, for which training waited for saves, to a step's metrics.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        tracker: Tracker,
        ranks: WorkerGroup,
        inputs: Mapping[str, Any],
        checksum_after: Callable[[int], str | None],
        check_weights: Callable[[], Awaitable[None]],
        copies: StateReplication,
        position: DataPosition,
        spikes: SpikeDetector | None = None,
    ) -> None:
        """`inputs` identifies models and data; a resumed run compares it with its own.

        `position` is the start's position in the data. `checksum_after` returns the checksum of the weights after a
        step, or None. `check_weights` is called before weights are saved or exported, and raises an error if their
        checksum differs. `copies` in host memory are made along with the saves. The state of `spikes` is saved too.
        """
        self.copies = copies
        self._checksum_after, self._check_weights = checksum_after, check_weights
        self._recipe, self._folder, self._tracker, self._ranks = recipe, folder, tracker, ranks
        self._inputs, self._spikes, self._position = inputs, spikes, position
        self._spikes_at_save: Mapping[str, Any] | None = None
        """State of the spike detector when the save began: later updates change it before a background save ends."""
        self._step_in_progress: int | None = None
        self._exported_at: int | None = None
        self._best = BestModel(recipe, folder, tracker, ranks)

    async def begin_due_saves(self, step: int, save_driver: Callable[[Path], None] | None = None) -> None:
        """Start the model export and the checkpoint save that are due after a step's updates.

        `save_driver` writes the driver's state into a folder. Raises DiskFullError.
        """
        config, last_step = self._recipe.checkpoint, self._recipe.train.steps
        is_exported = bool(config.export_every_steps) and step % config.export_every_steps == 0
        is_saved = bool(config.every_steps) and (step % config.every_steps == 0 or step == last_step)
        if is_exported or is_saved:
            await self._check_weights()
        # Exports wait for the ranks, so they are not part of an asynchronous save.
        if is_exported:
            with self._tracker.phase("export"):
                await self._ranks.call("export", self._step_folder(step))
            self._exported_at = step
        # Before the checkpoint: both need the engines asleep, and the evaluation follows only after the reshard.
        await self._best.export_candidate(step)
        if is_saved:
            await self._begin_save(step, save_driver, config.asynchronous, is_resharded=False)
        await self.copies.begin_copy(self._ranks, step, save_driver, self._checksum_after(step), self._spike_state())

    def keep_if_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the step's model in `hf_best/` if these metrics are the best so far.

        Also write the cards of models exported at this step, whose metrics must have been logged.
        """
        self._best.keep_if_best(step, metrics)
        exported = {self._step_folder(step): self._exported_at, self._folder.path / "hf_best": self._best.step}
        for folder, exported_at in exported.items():
            if exported_at == step:
                write_card(self._folder.path, folder, step)

    async def save(
        self,
        step: int,
        save_driver: Callable[[Path], None] | None = None,
    ) -> None:
        """Save the state after a step and its reshard, and wait. Does nothing if the checkpoint exists."""
        await self._check_weights()
        if self._step_in_progress != step and not self._checkpoint_folder(step).exists():
            await self._begin_save(step, save_driver, False, is_resharded=True)
        await self.complete_save(wait=True)

    async def copy_to_memory(self, step: int, save_driver: Callable[[Path], None] | None) -> None:
        """Copy the state after a step and its reshard to host memory, and wait for all ranks."""
        await self._check_weights()
        await self.copies.begin_copy(
            self._ranks,
            step,
            save_driver,
            self._checksum_after(step),
            self._spike_state(),
            is_forced=True,
            is_resharded=True,
        )
        await self.copies.complete_copy(self._ranks, wait=True)

    def _spike_state(self) -> Mapping[str, Any] | None:
        return None if self._spikes is None else self._spikes.as_json()

    async def _begin_save(
        self, step: int, save_driver: Callable[[Path], None] | None, asynchronous: bool, *, is_resharded: bool
    ) -> None:
        """Start a save of this step. With `asynchronous`, the ranks write in the background."""
        await self.complete_save(wait=True)
        partial = self._partial_folder(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self._step_in_progress = step
        self._spikes_at_save = self._spike_state()
        if save_driver:
            with self._remove_save_when_full(), raise_disk_full_errors(partial, 0):
                save_driver(partial)
        with self._tracker.phase("checkpoint"):
            await self._call_ranks("save_checkpoint", partial, asynchronous, is_resharded)

    async def complete_save(self, *, wait: bool = False) -> None:
        """Publish the save in progress if all ranks have written their parts. With `wait`, wait for them."""
        await self.copies.complete_copy(self._ranks, wait=wait)
        if self._step_in_progress is None:
            return
        with self._tracker.phase("checkpoint"):
            files_by_rank = await self._call_ranks("finish_checkpoint", wait)
            if None in files_by_rank:
                return
            # Metrics must be on disk before the checkpoint: a resumed run continues their files at its step.
            self._tracker.flush()
            self._publish(self._step_in_progress, dict(ChainMap(*files_by_rank)))
        self._step_in_progress = None

    def _publish(self, step: int, files: dict[str, Any]) -> None:
        """Write driver.json and the manifest, rename the folder to its final name, and remove old checkpoints."""
        faults.reach("manifest")
        partial, checkpoints_folder = self._partial_folder(step), self._folder.checkpoints_folder
        driver_values = {
            "schema": SCHEMA, "step": step, "recipe": plain_recipe(self._recipe), **self._inputs,
            "checksum": self._checksum_after(step),
            "spikes": self._spikes_at_save, "drawn": self._position.after(step, self._recipe).as_json(),
        }  # fmt: skip
        replace_text(partial / DRIVER, json.dumps(driver_values, indent=2) + "\n")
        # The manifest comes last, then the rename: only a complete save gets a checkpoint's name.
        complete_manifest(partial, files, {"format": "torch_dist"})
        target = self._checkpoint_folder(step)
        faults.reach("publish")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync(checkpoints_folder)
        faults.reach("latest")
        replace_text(checkpoints_folder / "latest", target.name + "\n")
        faults.reach("remove")
        # Remove older checkpoints only after the new one is seen complete under its final name.
        if check_sizes(target):
            for old_checkpoint in RunRecord.read(self._folder.path).checkpoints[self._recipe.checkpoint.keep :]:
                # `checkpoint.best` also retains the checkpoint of the best step, in addition to the newest `keep`.
                if checkpoint_step(old_checkpoint) != self._best.step:
                    # Rename before removal: if the process dies during rmtree, a half-removed folder must not look like
                    # a checkpoint.
                    shutil.rmtree(old_checkpoint.rename(checkpoints_folder / f".{old_checkpoint.name}.removed"))

    def _step_folder(self, step: int) -> Path:
        return self._folder.path / f"hf_step_{step:06d}"

    def _checkpoint_folder(self, step: int) -> Path:
        return self._folder.checkpoints_folder / f"step_{step:06d}"

    def _partial_folder(self, step: int) -> Path:
        return self._folder.checkpoints_folder / f".step_{step:06d}.partial"

    async def _call_ranks(self, method: str, *arguments: Any) -> list[Any]:
        with self._remove_save_when_full():
            return await self._ranks.call(method, *arguments)

    @contextmanager
    def _remove_save_when_full(self) -> Iterator[None]:
        """Context that removes the save in progress if the disk is full, so that the space is free again."""
        try:
            yield
        except DiskFullError:
            assert self._step_in_progress is not None
            shutil.rmtree(self._partial_folder(self._step_in_progress), ignore_errors=True)
            raise


@dataclass(frozen=True, slots=True)
class Survey:
    """The newest valid checkpoint, and the faults of newer, damaged ones by name."""

    newest_intact: Path | None
    damaged: Mapping[str, str]

    def clean_folder(self, checkpoints_folder: Path) -> None:
        """Rename damaged checkpoints, remove incomplete saves, and let `latest` name the valid checkpoint.

        Raises StorageError.
        """
        with raise_storage_errors(checkpoints_folder):
            for name in self.damaged:
                _rename_damaged(checkpoints_folder / name)
            remove_incomplete_saves(checkpoints_folder)
            if (
                self.newest_intact
                and read_or_none(checkpoints_folder / "latest") != f"{self.newest_intact.name}\n".encode()
            ):
                replace_text(checkpoints_folder / "latest", self.newest_intact.name + "\n")


def remove_incomplete_saves(checkpoints_folder: Path) -> None:
    """Remove interrupted saves in the folder of a run's checkpoints. Reads no file."""
    for leftover in checkpoints_folder.glob(".step_*"):
        if _LEFTOVER.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)


def survey_checkpoints(run_record: RunRecord) -> Survey:
    """Find the newest checkpoint whose files match its manifest. Changes nothing.

    A checkpoint counts as damaged only if a file is proved wrong. Raises StorageError for an unreadable checkpoint, or
    DataError if there are checkpoints but no valid one.
    """
    # Imported here because it loads torch's checkpoint code, which a run without checkpoints does not need.
    from megarl.checkpoint.torch_dist_reader import check_intact

    damaged_checkpoints: dict[str, str] = {}
    for folder in run_record.checkpoints:
        try:
            with raise_storage_errors(folder):
                check_intact(folder)
        except DataError as error:
            damaged_checkpoints[folder.name] = str(error)
        else:
            return Survey(folder, damaged_checkpoints)
    try:
        run_record.refuse_start_over()
    except DataError as error:
        raise DataError("\n  ".join([str(error), *damaged_checkpoints.values()])) from None
    return Survey(None, {})


def plain_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as JSON values, with secrets as references."""
    import yaml

    return yaml.safe_load(to_yaml(recipe))


def _rename_damaged(folder: Path) -> None:
    """Rename a folder to NAME.damaged, NAME.damaged_2 and so on, so it can be inspected."""
    target, copy_number = folder.with_name(f"{folder.name}.damaged"), 1
    while target.exists():
        copy_number += 1
        target = folder.with_name(f"{folder.name}.damaged_{copy_number}")
    folder.rename(target)
