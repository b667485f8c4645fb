"""Driver side of checkpoints: atomic saves, verification before use, removal of old ones, export of the best model.

`checkpoints/step_NNNNNN/` contains the trainer's state, `driver.json` and `manifest.json`, written last. RL runs add
their position in the data (`collection`). `checkpoints/latest` names the newest checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl import faults
from megarl.checkpoint.manifest import MANIFEST, check_hashes, check_sizes, file_record, write_manifest
from megarl.cluster.worker_group import WorkerGroup
from megarl.config import Recipe
from megarl.config.recipe import to_yaml
from megarl.files.atomic import disk_full_named, replace_text, storage_faults_named, sync
from megarl.files.model_folder import read_object
from megarl.loops.saving.data_position import DataPosition
from megarl.loops.saving.state_replication import StateReplication
from megarl.report.model_card import write_card
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.run_record import DRIVER, SCHEMA, RunRecord, checkpoint_step
from megarl.tracking.spikes import SpikeDetector
from megarl.tracking.tracker import Tracker
from megarl.types import DataError, DiskFullError

BEST = "best.json"
"""File in a retained model folder with its step, metric and value."""

_LEFTOVER = re.compile(r"\.step_\d{6,}\.(partial|removed)")


class Checkpoints:
    """Saves a run's checkpoints at the steps of its recipe.

    Adds `time/checkpoint_seconds`, the time for which training waited for saves, to a step's metrics.
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
        """Prepare the saves of a run. `inputs` identifies models and data; a resumed run compares it with its own.

        `position` is that in the data at the start.
        `checksum_after` returns the checksum of the weights after a step, None if it was not computed. `check_weights`
        is called before weights are saved or exported; it raises an error if a bit of them changed. `copies` are those
        in host memory, made along with the saves. The memory of `spikes` is saved too.
        """
        self.copies = copies
        self._checksum_after, self._check_weights = checksum_after, check_weights
        self._recipe, self._folder, self._tracker, self._ranks = recipe, folder, tracker, ranks
        self._inputs, self._spikes, self._position = inputs, spikes, position
        self._spikes_then: Mapping[str, Any] | None = None
        """Memory of the spikes at the begin of the save. A background save ends when later updates have been added."""
        self._begun: int | None = None
        self._exported_at: int | None = None
        self._best = BestModel(recipe, folder, tracker, ranks)

    async def begin(self, step: int, save_driver: Callable[[Path], None] | None = None) -> None:
        """Start the model export and the checkpoint save if they are due after a step's updates.

        `save_driver` writes the driver's state into the checkpoint folder. Raises DiskFullError.
        """
        settings, last = self._recipe.checkpoint, self._recipe.train.steps
        is_exported = bool(settings.export_every_steps) and step % settings.export_every_steps == 0
        is_saved = bool(settings.every_steps) and (step % settings.every_steps == 0 or step == last)
        if is_exported or is_saved:
            await self._check_weights()
        # Exports wait for the ranks, so they are not part of an asynchronous save.
        if is_exported:
            with self._tracker.phase("export"):
                await self._ranks.call("export", self._step_folder(step))
            self._exported_at = step
        # Before the checkpoint: both need the engines asleep, and the evaluation follows only after the reshard.
        await self._best.take(step)
        if is_saved:
            await self._begin(step, save_driver, settings.asynchronous, is_resharded=False)
        await self.copies.begin(self._ranks, step, save_driver, self._checksum_after(step), self._memory_of_spikes())

    def judge(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the step's model to `hf_best/` if its evaluation is the best so far. `metrics` are the evaluation's.

        Also write the cards of models exported at this step. All its metrics must have been logged.
        """
        self._best.judge(step, metrics)
        exported = {self._step_folder(step): self._exported_at, self._folder.path / "hf_best": self._best.step}
        for folder, exported_at in exported.items():
            if exported_at == step:
                write_card(self._folder.path, folder, step)

    async def save(
        self,
        step: int,
        save_driver: Callable[[Path], None] | None = None,
    ) -> None:
        """Save the state after a step and its reshard, and wait for the save. Does nothing if the checkpoint exists."""
        await self._check_weights()
        if self._begun != step and not self._published(step).exists():
            await self._begin(step, save_driver, False, is_resharded=True)
        await self.complete(wait=True)

    async def copy(self, step: int, save_driver: Callable[[Path], None] | None) -> None:
        """Copy the state after a step and its reshard to host memory, and wait until all ranks have the copies."""
        await self._check_weights()
        await self.copies.begin(
            self._ranks,
            step,
            save_driver,
            self._checksum_after(step),
            self._memory_of_spikes(),
            is_forced=True,
            is_resharded=True,
        )
        await self.copies.complete(self._ranks, wait=True)

    def _memory_of_spikes(self) -> Mapping[str, Any] | None:
        return None if self._spikes is None else self._spikes.as_json()

    async def _begin(
        self, step: int, save_driver: Callable[[Path], None] | None, asynchronous: bool, *, is_resharded: bool
    ) -> None:
        await self.complete(wait=True)
        partial = self._partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self._begun = step
        self._spikes_then = self._memory_of_spikes()
        if save_driver:
            with self._removed_when_full(), disk_full_named(partial, 0):
                save_driver(partial)
        with self._tracker.phase("checkpoint"):
            await self._of_ranks("save_checkpoint", partial, asynchronous, is_resharded)

    async def complete(self, *, wait: bool = False) -> None:
        """Publish the save in progress if all ranks have written their part.

        `wait`: wait until they have.
        """
        await self.copies.complete(self._ranks, wait=wait)
        if self._begun is None:
            return
        with self._tracker.phase("checkpoint"):
            parts = await self._of_ranks("finish_checkpoint", wait)
            if None in parts:
                return
            # Metrics must be on disk before the checkpoint: a resumed run continues their files at its step.
            self._tracker.flush()
            self._publish(self._begun, dict(ChainMap(*parts)))
        self._begun = None

    def _publish(self, step: int, files: dict[str, Any]) -> None:
        """Write driver.json and the manifest, rename the folder to its final name, and remove old checkpoints."""
        faults.reach("manifest")
        partial, home = self._partial(step), self._folder.checkpoints_folder
        driver = {
            "schema": SCHEMA, "step": step, "recipe": plain_recipe(self._recipe), **self._inputs,
            "checksum": self._checksum_after(step),
            "spikes": self._spikes_then, "drawn": self._position.after(step, self._recipe).as_json(),
        }  # fmt: skip
        replace_text(partial / DRIVER, json.dumps(driver, indent=2) + "\n")
        for path in partial.iterdir():
            # Ranks have hashed and synced their own files. These are the driver's.
            if path.name not in files:
                sync(path)
                files[path.name] = file_record(path)
        # The manifest comes last, then the rename: only a complete save gets a checkpoint's name.
        write_manifest(partial, files, {"format": "torch_dist"})
        target = self._published(step)
        faults.reach("publish")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync(home)
        faults.reach("latest")
        replace_text(home / "latest", target.name + "\n")
        faults.reach("remove")
        # Older checkpoints go only after the new one is seen complete under its final name.
        if check_sizes(target):
            for older in RunRecord.read(self._folder.path).checkpoints[self._recipe.checkpoint.keep :]:
                # `checkpoint.best` also retains the checkpoint of the best step, in addition to the newest `keep`.
                if checkpoint_step(older) != self._best.step:
                    # Rename before removal: if the process dies during rmtree, a half-removed folder must not look like
                    # a checkpoint.
                    shutil.rmtree(older.rename(home / f".{older.name}.removed"))

    def _step_folder(self, step: int) -> Path:
        return self._folder.path / f"hf_step_{step:06d}"

    def _published(self, step: int) -> Path:
        return self._folder.checkpoints_folder / f"step_{step:06d}"

    def _partial(self, step: int) -> Path:
        return self._folder.checkpoints_folder / f".step_{step:06d}.partial"

    async def _of_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all trainer ranks. On a DiskFullError, remove the incomplete save."""
        with self._removed_when_full():
            return await self._ranks.call(method, *arguments)

    @contextmanager
    def _removed_when_full(self) -> Iterator[None]:
        """Context that removes the incomplete save if a DiskFullError is raised in it."""
        try:
            yield
        except DiskFullError:
            assert self._begun is not None
            shutil.rmtree(self._partial(self._begun), ignore_errors=True)
            raise


class BestModel:
    """Model of the best evaluated step so far.

    Before a step's evaluation, while the engines sleep, its model is exported to `hf_candidate/`. If the evaluation is
    the best so far, the folder is renamed to `hf_best/`, else it is removed. A run killed in between still has the
    previous best model.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, tracker: Tracker, ranks: WorkerGroup) -> None:
        """Read the step and the metric of the best model so far (hf_best/best.json). Raises StorageError or DataError
        if it cannot be read."""
        self._recipe, self._tracker, self._ranks = recipe, tracker, ranks
        self._metric = recipe.checkpoint.best
        self._candidate, self._kept = folder.path / "hf_candidate", folder.path / "hf_best"
        self._taken_at: int | None = None
        self.step: int | None = None
        """Step of the best model. None: no step was evaluated."""
        self._value = math.nan
        if self._metric is None:
            return
        with storage_faults_named(folder.path):
            # Complete renames interrupted by a kill before anything is read.
            for model_folder in (self._kept, _adapter(self._kept)):
                _settle(model_folder)
            candidate = _read_best(self._candidate)
            # The value is written only after the verdict, so this candidate won and only the renaming is missing.
            if "value" in candidate:
                self._keep()
            else:
                self._taken_at = candidate.get("step")
            best = _read_best(self._kept)
        # This step may come after the resumed checkpoint and be trained again. Its model still exists and its value was
        # measured, so it counts.
        if best.get("metric") == self._metric:
            self.step, self._value = best["step"], float(best["value"])

    async def take(self, step: int) -> None:
        """Export the model of a step followed by an evaluation. The engines must sleep. Raises DiskFullError."""
        if self._metric is None or not self._recipe.evaluates_at(step):
            return
        with self._tracker.phase("export"):
            await self._ranks.call("export", self._candidate)
        self._describe({"step": step})
        self._taken_at = step

    def judge(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the model exported at `step` if its evaluation is the best so far, else remove it."""
        if self._metric is None or self._taken_at != step:
            return
        self._taken_at = None
        value = metrics.get(self._metric)
        if value is None:
            measured = ", ".join(name for name in metrics if name.startswith("val/")) or "none"
            self._tracker.notice_once(
                "best",
                f"checkpoint.best = {self._metric}: is not a metric of this run's evaluations; they have {measured}",
            )
        if value is None or not self._is_best(value):
            for folder in (self._candidate, _adapter(self._candidate)):
                shutil.rmtree(folder, ignore_errors=True)
            return
        # After this line the candidate counts as the best. If the run is killed before the folders are renamed, the
        # resumed run renames them.
        self._describe({"step": step, "metric": self._metric, "value": value})
        self._keep()
        self.step, self._value = step, value

    def _keep(self) -> None:
        # Adapters first: `hf_best/best.json`, in the model folder, then implies that both are complete.
        if _adapter(self._candidate).exists():
            _replace(_adapter(self._kept), _adapter(self._candidate))
        _replace(self._kept, self._candidate)

    def _is_best(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        # Losses improve downwards, all other metrics of evaluations upwards.
        is_falling = str(self._metric).endswith("/loss")
        return self.step is None or (value < self._value if is_falling else value > self._value)

    def _describe(self, facts: Mapping[str, Any]) -> None:
        replace_text(self._candidate / BEST, json.dumps(facts) + "\n")


@dataclass(frozen=True, slots=True)
class Survey:
    """The newest valid checkpoint, and the faults of newer, damaged ones by name."""

    good: Path | None
    damaged: Mapping[str, str]

    def settle(self, home: Path) -> None:
        """Rename damaged checkpoints, remove incomplete saves, and let `latest` name the valid checkpoint.

        Raises StorageError.
        """
        with storage_faults_named(home):
            for name in self.damaged:
                _rename_damaged(home / name)
            remove_incomplete_saves(home)
            if self.good and _read(home / "latest") != self.good.name + "\n":
                replace_text(home / "latest", self.good.name + "\n")


def remove_incomplete_saves(home: Path) -> None:
    """Remove saves in the folder `home` of a run's checkpoints that were interrupted. Reads no file of a checkpoint."""
    for leftover in home.glob(".step_*"):
        if _LEFTOVER.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)


def survey(earlier: RunRecord) -> Survey:
    """Find the newest checkpoint whose files match its manifest. Changes nothing.

    A checkpoint counts as damaged only if a file is proved wrong. Raises StorageError if a checkpoint cannot be read at
    all. Raises DataError if there are checkpoints but no valid one.
    """
    # Imported here because it loads torch's checkpoint code, which a run without checkpoints does not need.
    from megarl.checkpoint.torch_dist_reader import check_harmless

    damaged: dict[str, str] = {}
    for folder in earlier.checkpoints:
        try:
            with storage_faults_named(folder):
                expected = check_sizes(folder)
                if not expected:
                    raise DataError(f"{folder / MANIFEST}: not found.")
                check_hashes(folder, expected)
                check_harmless(folder)
        except DataError as error:
            damaged[folder.name] = str(error)
        else:
            return Survey(folder, damaged)
    try:
        earlier.refuse_start_over()
    except DataError as error:
        raise DataError("\n  ".join([str(error), *damaged.values()])) from None
    return Survey(None, {})


def plain_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as JSON values, with secrets as references."""
    import yaml

    return yaml.safe_load(to_yaml(recipe))


def _rename_damaged(folder: Path) -> None:
    """Rename a folder to NAME.damaged, or NAME.damaged_2 and so on, so it can be inspected."""
    target, number = folder.with_name(f"{folder.name}.damaged"), 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.damaged_{number}")
    folder.rename(target)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _adapter(folder: Path) -> Path:
    """Return the folder with the LoRA adapters of the model exported to `folder`."""
    return folder.with_name("adapter" + folder.name.removeprefix("hf"))


def _removed(folder: Path) -> Path:
    """Return the temporary name of a folder under removal."""
    return folder.with_name(f".{folder.name}.removed")


def _replace(folder: Path, newer: Path) -> None:
    """Rename `newer` to `folder`, which may be missing. `_settle` completes an interrupted call."""
    shutil.rmtree(_removed(folder), ignore_errors=True)
    if folder.exists():
        folder.rename(_removed(folder))
    # Two renames, not copy and delete: a model of 100 GB would take minutes, and a kill would leave a partial folder.
    newer.rename(folder)
    # Only the sync of the parent makes the rename survive a crash of the machine.
    sync(folder.parent)
    shutil.rmtree(_removed(folder), ignore_errors=True)


def _settle(folder: Path) -> None:
    """Complete a `_replace` interrupted by the end of the process."""
    if not _removed(folder).exists():
        return
    if folder.exists():
        shutil.rmtree(_removed(folder), ignore_errors=True)
    else:
        _removed(folder).rename(folder)


def _read_best(folder: Path) -> dict[str, Any]:
    """Return the contents of `best.json` in a model folder, {} if it is missing."""
    path = folder / BEST
    return read_object(path) if path.is_file() else {}
