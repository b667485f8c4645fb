"""Trackers for a recipe: destinations of metrics and samples in addition to `metrics.jsonl`.

To add a tracker, write one file with a class like `RunTracker`, and add a line to TRACKERS. A recipe may also name a
user's tracker by import path.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megarl.files.import_path import Choices
from megarl.types import ConfigError

TRACKERS = {
    "tensorboard": "megarl.tracking.trackers.tensorboard:TensorBoard",
    "wandb": "megarl.tracking.trackers.wandb:WandB",
    "mlflow": "megarl.tracking.trackers.mlflow:MLflow",
    "trackio": "megarl.tracking.trackers.trackio:Trackio",
}
"""Import paths of built-in trackers, by their names in a recipe."""


class RunTracker(Protocol):
    """A tracker of one run. If a method raises, the tracker is dropped with a warning, and the run continues.

    megarl calls `Class(folder, resumed_step)`: the run folder, and the step of the resumed checkpoint (0: a new run).
    The tracker must discard values logged for later steps.

    A class may have `modules`: names of modules imported at its start, each with a remedy if the import fails. A static
    method `check()` may raise ConfigError if the environment does not allow a start. An optional method
    `unhealthy(step, rule, text)` receives the warnings of health rules.
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log a step's metrics by name. Step numbers increase.

        If a step is evaluated, a second call with its number has the evaluation's metrics.
        """

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Log samples as plain records (prompt, completion, reward...). `set` in a record names its validation set."""

    def sync(self) -> None:
        """Store everything logged so far, so that it survives a crash."""

    def close(self) -> None:
        """Close files and connections at the end of the run."""


_CHOICES = Choices("trackers", "tracker", "class", TRACKERS, takes_files=False)


def find_import_path(name: str) -> str:
    """Return the `package.module:Class` of a tracker named in a recipe. Raises ConfigError for an unknown name."""
    return _CHOICES.find_import_path(name)


def check(name: str, *, is_here: bool) -> None:
    """Import a tracker's modules. `is_here`: the run starts on this machine, so check its environment too.

    Raises ConfigError with field and remedy.
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
    """Construct a run's tracker. Raises ConfigError, and any error of the tracker's constructor."""
    return _CHOICES.load(name)(folder, resumed_step)
