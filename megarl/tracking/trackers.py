"""The trackers that a recipe may name: where a run's metrics and samples go beside its own `metrics.jsonl`.

A new tracker is one file with a class like `RunTracker`, and one line of TRACKERS; one that is not megarl's is named by
its import path.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megarl.types import ConfigError

TRACKERS = {
    "tensorboard": "megarl.tracking.tensorboard:TensorBoard",
}
"""Name in a recipe -> `package.module:Class`, imported when a run begins."""


class RunTracker(Protocol):
    """Is told of every step of one run. An error ends the tracker, said once, but not the run.

    Made as `Class(folder, resumed_step)`: the run folder, and the step of the checkpoint that the run goes on from,
    0 for a run from its beginning. What was logged of later steps is to be forgotten.
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a step's scalars by name; steps only grow."""

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Take plain records (prompt, completion, reward...); `set` of a record names its validation set."""

    def sync(self) -> None:
        """Have what was taken outlive a crash."""

    def close(self) -> None:
        """Let go of everything."""


def locate(name: str) -> str:
    """The `package.module:Class` that a recipe's tracker stands for; imports nothing. Raises ConfigError."""
    module, colon, attribute = TRACKERS.get(name, name).partition(":")
    if colon and attribute.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        return f"{module}:{attribute}"
    near = difflib.get_close_matches(name, TRACKERS, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"trackers: unknown tracker {name!r}.{hint} Known: {', '.join(TRACKERS)}; your own: package.module:Class."
    )


def start(name: str, folder: Path, resumed_step: int) -> RunTracker:
    """The tracker of that name for a run. Raises ConfigError, and whatever the tracker's own start raises."""
    module_name, _, class_name = locate(name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"trackers: {name!r}: cannot import {module_name}: {error}") from error
    kind: Callable[[Path, int], RunTracker] | None = getattr(module, class_name, None)
    if not callable(kind):
        raise ConfigError(f"trackers: {name!r}: module {module_name} has no class {class_name!r}.")
    return kind(folder, resumed_step)
