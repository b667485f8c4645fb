"""The model of a run's best evaluation (checkpoint.best)."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config import Recipe
from megarl.files.atomic import end_replacement, raise_storage_errors, replace_folder, replace_text
from megarl.files.model_folder import read_object, sibling_folder
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import DataError

BEST = "best.json"
"""File in a model folder with the model's step, metric and value."""


@dataclass(frozen=True, slots=True)
class BestRecord:
    """Contents of best.json: step and evaluation of an exported model. None: not evaluated yet."""

    step: int
    metric: str | None = None
    value: float | None = None

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the record in a model folder, or None. Raises DataError if it is damaged."""
        path = folder / BEST
        if not path.is_file():
            return None
        content = read_object(path)
        step: Any = content.get("step")
        metric: Any = content.get("metric")
        value: Any = content.get("value")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_valid_by_field = {
            "step": type(step) is int and step >= 0,
            "metric": isinstance(metric, str | None),
            # math.isfinite would raise OverflowError: JSON integers have any size.
            "value": value is None or (is_number and abs(value) <= sys.float_info.max),
        }
        for name, is_valid in is_valid_by_field.items():
            if not is_valid:
                raise DataError(
                    f"{path}: {name} = {content.get(name)!r:.80}: is missing or damaged; remove the folder {folder}"
                )
        return cls(step, metric, None if value is None else float(value))

    def write(self, folder: Path) -> None:
        values = {name: value for name, value in asdict(self).items() if value is not None}
        replace_text(folder / BEST, json.dumps(values) + "\n")


class BestModel:
    """Exports the model of the best evaluated step so far.

    Before a step's evaluation, while the engines sleep, its model is exported to `hf_candidate/`. The best model so far
    is then renamed to `hf_best/`, any other is removed. A run killed in between still has the previous best model.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, tracker: Tracker, ranks: WorkerGroup) -> None:
        """Read hf_best/best.json, and complete interrupted renames. Raises StorageError or DataError."""
        self._recipe, self._tracker, self._ranks = recipe, tracker, ranks
        self._metric = recipe.checkpoint.best
        self._candidate, self._best = folder.path / "hf_candidate", folder.path / "hf_best"
        self._exported_step: int | None = None
        self.step: int | None = None
        """Step of the best model; None: no step was evaluated."""
        self._value = math.nan
        if self._metric is None:
            return
        with raise_storage_errors(folder.path):
            # Complete renames interrupted by a kill before anything is read.
            for model_folder in (self._best, *_companions(self._best)):
                end_replacement(model_folder)
            candidate = BestRecord.read(self._candidate)
            # The value is written only after the verdict. So this candidate was the best, and only the renaming is
            # missing.
            if candidate is not None and candidate.value is not None:
                self._publish_candidate()
            elif candidate is not None:
                self._exported_step = candidate.step
            best = BestRecord.read(self._best)
        # This step may come after the resumed checkpoint and be trained again. Its model still exists and has a value,
        # so it counts.
        if best is not None and best.value is not None and best.metric == self._metric:
            self.step, self._value = best.step, best.value

    async def export_candidate(self, step: int) -> None:
        """Export the model of a step with an evaluation. The engines must sleep. Raises DiskFullError."""
        if self._metric is None or not self._recipe.evaluates_at(step):
            return
        with self._tracker.phase("export"):
            await self._ranks.call("export", self._candidate)
        BestRecord(step).write(self._candidate)
        self._exported_step = step

    def keep_if_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the model exported at `step` if its evaluation is the best so far, else remove it."""
        if self._metric is None or self._exported_step != step:
            return
        self._exported_step = None
        value = metrics.get(self._metric)
        if value is None:
            val_metrics = ", ".join(name for name in metrics if name.startswith("val/")) or "none"
            self._tracker.notice_once(
                "best",
                f"checkpoint.best = {self._metric}: is not a metric of this run's evaluations; they have {val_metrics}",
            )
        if value is None or not self._is_best(value):
            for folder in (self._candidate, *_companions(self._candidate)):
                shutil.rmtree(folder, ignore_errors=True)
            return
        # After this line the candidate counts as the best. If the run is killed before the folders are renamed, the
        # resumed run renames them.
        BestRecord(step, self._metric, float(value)).write(self._candidate)
        self._publish_candidate()
        self.step, self._value = step, value

    def _publish_candidate(self) -> None:
        # Rename the model's folder last: its `hf_best/best.json` then implies that all folders are complete.
        for best, candidate in zip(_companions(self._best), _companions(self._candidate), strict=True):
            if candidate.exists():
                replace_folder(candidate, best)
        replace_folder(self._candidate, self._best)

    def _is_best(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        # Losses improve downwards, all other metrics of evaluations upwards.
        is_falling = str(self._metric).endswith("/loss")
        return self.step is None or (value < self._value if is_falling else value > self._value)


def _companions(folder: Path) -> list[Path]:
    """Return the folders that an export may write next to a model folder: LoRA adapters, a trained drafter."""
    return [sibling_folder(folder, name) for name in ("adapter", "drafter")]
