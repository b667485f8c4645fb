"""Checkpoints of a run as the driver keeps them: complete or not there, checked before use, the newest few.

`checkpoints/step_NNNNNN/` holds the trainer's state (`training.checkpoint`), `driver.json`, in rl what was drawn
(`collection`) and, written last, `manifest.json`; `checkpoints/latest` names the newest.
"""

from __future__ import annotations

import json
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.recipe import to_yaml
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.storage import disk_full_named, replace_text, sync
from megarl.tracking.tracker import Tracker
from megarl.types import DataError, DiskFullError
from megarl.weights.layouts.torch_dist_reader import check_harmless
from megarl.weights.ledger import MANIFEST, check_hashes, check_sizes, file_record, write_manifest
from megarl.workers.process_group import ProcessGroup

DRIVER = "driver.json"
_HARMLESS = {"cluster", "trainer", "weights", "checkpoint", "runs_folder", "name"}
"""Parts of the recipe that a resumed run may change without training differently."""


class Checkpoints:
    """Saves of a run under way, at the steps that its recipe names.

    Adds to a step's metrics `time/checkpoint_seconds`: how long training waited for its saves.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, tracker: Tracker, ranks: ProcessGroup) -> None:
        self._recipe, self._folder, self._tracker, self._ranks = recipe, folder, tracker, ranks
        self._begun: int | None = None

    async def begin(self, step: int, save_driver: Callable[[Path], None] | None = None) -> None:
        """Save the trainer's state after a step's updates, and the driver's own, if the step is due.

        `save_driver` writes into the checkpoint's folder. Raises DiskFullError.
        """
        settings = self._recipe.checkpoint
        if settings.export_every_steps and step % settings.export_every_steps == 0:
            with self._tracker.phase("export"):
                await self._ranks.call("export", self._folder.path / f"hf_step_{step:06d}")
        every = settings.every_steps
        if every and (step % every == 0 or step == self._recipe.train.steps):
            await self._begin(step, save_driver, settings.asynchronous, is_resharded=False)

    async def save(self, step: int, save_driver: Callable[[Path], None] | None = None) -> None:
        """Save the state after a step, reshard and all, and wait for it, unless that is done already."""
        if self._begun != step and not self._published(step).exists():
            await self._begin(step, save_driver, False, is_resharded=True)
        await self.complete(wait=True)

    async def _begin(
        self, step: int, save_driver: Callable[[Path], None] | None, asynchronous: bool, *, is_resharded: bool
    ) -> None:
        await self.complete(wait=True)
        partial = self._partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self._begun = step
        if save_driver:
            with self._removed_when_full(), disk_full_named(partial, 0):
                save_driver(partial)
        with self._tracker.phase("checkpoint"):
            await self._of_ranks("save_checkpoint", partial, asynchronous, is_resharded)

    async def complete(self, *, wait: bool = False) -> None:
        """Make what was begun a checkpoint, if all ranks have written their share or after they have (`wait`)."""
        if self._begun is None:
            return
        with self._tracker.phase("checkpoint"):
            parts = await self._of_ranks("finish_checkpoint", wait)
            if None in parts:
                return
            self._tracker.flush()
            self._publish(self._begun, dict(ChainMap(*parts)))
        self._begun = None

    def _publish(self, step: int, files: dict[str, Any]) -> None:
        partial, home = self._partial(step), self._folder.checkpoints_folder
        driver = {"step": step, "recipe": _plain(self._recipe)}
        replace_text(partial / DRIVER, json.dumps(driver, indent=2) + "\n")
        for path in partial.iterdir():
            if path.name not in files:
                sync(path)
                files[path.name] = file_record(path)
        write_manifest(partial, files, {"format": "torch_dist"})
        target = self._published(step)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync(home)
        replace_text(home / "latest", target.name + "\n")
        if check_sizes(target):
            for older in _found(home)[self._recipe.checkpoint.keep :]:
                # First it loses its name: half a checkpoint must not look like one.
                shutil.rmtree(older.rename(home / f".{older.name}.removed"))

    def _published(self, step: int) -> Path:
        return self._folder.checkpoints_folder / f"step_{step:06d}"

    def _partial(self, step: int) -> Path:
        return self._folder.checkpoints_folder / f".step_{step:06d}.partial"

    async def _of_ranks(self, method: str, *arguments: Any) -> list[Any]:
        with self._removed_when_full():
            return await self._ranks.call(method, *arguments)

    @contextmanager
    def _removed_when_full(self) -> Iterator[None]:
        """Remove what was begun where the disk is full."""
        try:
            yield
        except DiskFullError:
            assert self._begun is not None
            shutil.rmtree(self._partial(self._begun), ignore_errors=True)
            raise


def newest_good(home: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; None where none was ever complete.

    A damaged one is warned of and renamed to `.damaged`. Raises DataError if none is good.
    """
    for leftover in home.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    found = _found(home)
    for folder in found:
        try:
            expected = check_sizes(folder)
            if not expected:
                raise DataError(f"{folder / MANIFEST}: not found.")
            check_hashes(folder, expected)
            check_harmless(folder)
            replace_text(home / "latest", folder.name + "\n")
            return folder
        except (DataError, OSError) as error:
            warn(f"checkpoint {folder.name} is left out: {error}")
            damaged = folder.with_name(f"{folder.name}.damaged")
            shutil.rmtree(damaged, ignore_errors=True)
            folder.rename(damaged)
    if found:
        raise DataError(
            f"{home}: none of its {len(found)} checkpoints is good. Bring one back from a copy, or remove the run's "
            "folder and start again."
        )
    return None


def checkpoint_step(folder: Path) -> int:
    """The step after which a checkpoint was made."""
    return int(folder.name.removeprefix("step_"))


def changed_sections(checkpoint: Path, recipe: Recipe) -> list[str]:
    """Parts of the recipe that decide what is trained and are not as they were when the checkpoint was made."""
    earlier = json.loads((checkpoint / DRIVER).read_text(encoding="utf-8"))["recipe"]
    return [name for name, now in _plain(recipe).items() if now != earlier.get(name) and name not in _HARMLESS]


def _found(home: Path) -> list[Path]:
    """Folders with a checkpoint's name, the newest first."""
    folders = (path for path in home.glob("step_*") if path.suffix != ".damaged")
    return sorted(folders, key=checkpoint_step, reverse=True)


def _plain(recipe: Recipe) -> dict[str, Any]:
    """The recipe without its secrets."""
    import yaml

    return yaml.safe_load(to_yaml(recipe))
