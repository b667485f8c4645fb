"""The trackers that a recipe may name: where a run's metrics and samples go beside its own `metrics.jsonl`.

A new tracker is one file with a class like `RunTracker`, and one line of TRACKERS; one that is not megarl's is named by
its import path.
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
    """Is told of every step of one run. An error ends the tracker, said once, but not the run.

    Made as `Class(folder, resumed_step)`: the run folder, and the step of the checkpoint that the run goes on from,
    0 for a run from its beginning. What was logged of later steps is to be forgotten.

    A class may have `modules`, which maps each module that it imports at its start to a remedy if that fails, and a
    static method `check()`, which raises ConfigError if the environment would not let it start.
    A method `unhealthy(step, rule, text)` is optional: it takes the warnings of `tracking.health`.
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a step's scalars by name; steps only grow."""

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Take plain records (prompt, completion, reward...); `set` of a record names its validation set."""

    def sync(self) -> None:
        """Have what was taken outlive a crash."""

    def close(self) -> None:
        """Let go of everything."""


_CHOICES = Choices("trackers", "tracker", "class", TRACKERS, takes_files=False)


def locate(name: str) -> str:
    """The `package.module:Class` that a recipe's tracker stands for; imports nothing. Raises ConfigError."""
    return _CHOICES.locate(name)


def check(name: str, *, is_here: bool) -> None:
    """Import what a tracker needs to start. `is_here`: the run starts in this environment, so check its variables too.

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
    """The tracker of that name for a run. Raises ConfigError, and whatever the tracker's own start raises."""
    return _CHOICES.load(name)(folder, resumed_step)
