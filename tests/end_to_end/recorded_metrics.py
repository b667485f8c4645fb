"""Metrics that runs have recorded, compared with the table of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.tracking.metric_table import find_row
from tests.logged_steps import logged_steps


def metrics(run: Path) -> list[dict[str, Any]]:
    """The steps of a run's metrics.jsonl."""
    return logged_steps(run)


def unknown_metrics(run: Path) -> set[str]:
    """Names in a run's metrics.jsonl that the table of all metrics lacks; `step` is none."""
    names = {name for line in metrics(run) for name in line} - {"step"}
    assert len(names) > 5
    return {name for name in names if find_row(name) is None}
