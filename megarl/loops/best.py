"""The best model of a run by a metric of its evaluations (`checkpoint.best`), exported to `hf_best/`."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.cluster.worker_group import WorkerGroup
from megarl.config import Recipe
from megarl.files.atomic import replace_text, storage_faults_named, sync
from megarl.files.model_folder import read_object
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker

BEST = "best.json"
"""The file of a kept model that names its step, metric and value."""


class BestModel:
    """The model of the best evaluated step so far.

    A step's model is exported before its evaluation, while the engines sleep, to `hf_candidate/`. If that evaluation is
    the best, the folder becomes `hf_best/`, else it is removed. A run that is killed in between has the one before.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, tracker: Tracker, ranks: WorkerGroup) -> None:
        """Raises StorageError or DataError where the model that was kept before cannot be read."""
        self._recipe, self._tracker, self._ranks = recipe, tracker, ranks
        self._metric = recipe.checkpoint.best
        self._candidate, self._kept = folder.path / "hf_candidate", folder.path / "hf_best"
        self._taken_at: int | None = None
        self.step: int | None = None
        """The step of the best model; None: none was evaluated."""
        self._value = math.nan
        if self._metric is None:
            return
        with storage_faults_named(folder.path):
            for kept in (self._kept, _adapter(self._kept)):
                _settle(kept)
            candidate = _read(self._candidate)
            if "value" in candidate:
                self._keep()
            else:
                self._taken_at = candidate.get("step")
            found = _read(self._kept)
        # Also that of a step that is about to be trained again: the model is there, and was measured.
        if found.get("metric") == self._metric:
            self.step, self._value = found["step"], float(found["value"])

    async def take(self, step: int) -> None:
        """Export the model of a step that ends with an evaluation. The engines sleep. Raises DiskFullError."""
        if self._metric is None or not self._recipe.evaluates_at(step):
            return
        with self._tracker.phase("export"):
            await self._ranks.call("export", self._candidate)
        self._describe({"step": step})
        self._taken_at = step

    def judge(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the model that was taken at a step, if its evaluation is the best, else remove it."""
        if self._metric is None or self._taken_at != step:
            return
        self._taken_at = None
        value = metrics.get(self._metric)
        if value is None:
            measured = ", ".join(name for name in metrics if name.startswith("val/")) or "none"
            self._tracker.notice_once(
                "best", f"checkpoint.best = {self._metric}: is no metric of this run's evaluations: {measured}"
            )
        if value is None or not self._is_best(value):
            for folder in (self._candidate, _adapter(self._candidate)):
                shutil.rmtree(folder, ignore_errors=True)
            return
        # From here on it is the best: a run that is killed before the folders have their names ends that at its resume.
        self._describe({"step": step, "metric": self._metric, "value": value})
        self._keep()
        self.step, self._value = step, value

    def _keep(self) -> None:
        if _adapter(self._candidate).exists():
            _replace(_adapter(self._kept), _adapter(self._candidate))
        _replace(self._kept, self._candidate)

    def _is_best(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        is_falling = str(self._metric).endswith("/loss")
        return self.step is None or (value < self._value if is_falling else value > self._value)

    def _describe(self, facts: Mapping[str, Any]) -> None:
        replace_text(self._candidate / BEST, json.dumps(facts) + "\n")


def _adapter(folder: Path) -> Path:
    """Where the adapters are of the model that is exported to a folder."""
    return folder.with_name("adapter" + folder.name.removeprefix("hf"))


def _removed(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.removed")


def _replace(folder: Path, newer: Path) -> None:
    """Put a newer folder in the place of one, which may be missing; `_settle` ends what is cut short."""
    shutil.rmtree(_removed(folder), ignore_errors=True)
    if folder.exists():
        folder.rename(_removed(folder))
    newer.rename(folder)
    sync(folder.parent)
    shutil.rmtree(_removed(folder), ignore_errors=True)


def _settle(folder: Path) -> None:
    if not _removed(folder).exists():
        return
    if folder.exists():
        shutil.rmtree(_removed(folder), ignore_errors=True)
    else:
        _removed(folder).rename(folder)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / BEST
    return read_object(path) if path.is_file() else {}
