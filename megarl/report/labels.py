"""Labels of the runs in a report, and the time of the report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol


class Named(Protocol):
    """A run or an evaluation, read from a folder with a name."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...


def distinct_labels(runs: Sequence[Named]) -> list[str]:
    """Return a unique label for each run: its name, after as many parent folders as needed."""
    labels = [run.name for run in runs]
    num_parts = 1
    # More than six parts of a path are too long for a label. Then numbers make it unique.
    while len(set(labels)) < len(labels) and num_parts < 6:
        num_parts += 1
        paths = [run.path.resolve().parts[-num_parts:] for run in runs]
        labels = [
            "/".join(parts) if labels.count(label) > 1 else label for parts, label in zip(paths, labels, strict=True)
        ]
    return [f"{label} ({number})" if labels.count(label) > 1 else label for number, label in enumerate(labels, 1)]


def now_text() -> str:
    return datetime.now().astimezone().isoformat(" ", "seconds")
