"""Trackers available to recipes: destinations for metrics and samples in addition to `metrics.jsonl`.

A new tracker is one file with a class like `RunTracker` and one line in TRACKERS. Recipes name other trackers by import
path.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megarl.files.import_path import Choices
from megarl.types import ConfigError

TRACKERS = {
    "tensorboard": "megarl.tracking.tensorboard:TensorBoard",
    "wandb": "megarl.tracking.wandb:WandB",
    "mlflow": "megarl.tracking.mlflow:MLflow",
}
"""Name in a recipe -> `package.module:Class`, imported when a run begins."""


class RunTracker(Protocol):
    """Receiver of every step of one run. If it raises, it is dropped with one warning; the run continues.

    It is constructed as `Class(folder, resumed_step)`: the run folder, and the step of the resumed checkpoint (0 for a
    new run). Values logged for later steps must be discarded.

    A class may have `modules`: each module imported at its start, with a remedy if the import fails. A static method
    `check()` may raise ConfigError if the environment prevents a start. An optional method `unhealthy(step, rule,
    text)` receives warnings of `tracking.health`.
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log a step's scalars by name. Steps increase."""

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Log plain records (prompt, completion, reward...). A record's `set` names its validation set."""

    def sync(self) -> None:
        """Make all logged data survive a crash."""

    def close(self) -> None:
        """Release all resources."""


_CHOICES = Choices("trackers", "tracker", "class", TRACKERS, takes_files=False)


def locate(name: str) -> str:
    """Return the `package.module:Class` for a recipe's tracker, without importing it. Raises ConfigError."""
    return _CHOICES.locate(name)


def check(name: str, *, is_here: bool) -> None:
    """Import the modules needed by a tracker.

    `is_here`: the run starts in this environment, so check its variables too. Raises ConfigError with field and remedy.
    """
    tracker = _CHOICES.load(name)
    modules: Mapping[str, str] = getattr(tracker, "modules", {})
    for module, remedy in modules.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # another library's module: it may raise anything
            raise ConfigError(
                f"trackers = {name}: cannot import {module} ({type(error).__name__}: {error}); {remedy}"
            ) from error
    if is_here and (check_variables := getattr(tracker, "check", None)):
        check_variables()


def start(name: str, folder: Path, resumed_step: int) -> RunTracker:
    """Start a tracker for a run. Raises ConfigError, and any error of the tracker's own start."""
    return _CHOICES.load(name)(folder, resumed_step)
