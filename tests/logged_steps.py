"""Steps that a run has logged, each with its evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def logged_steps(run: Path) -> list[dict[str, Any]]:
    """Return the steps of a run's metrics.jsonl as plain JSON objects. A line that is not complete is left out.

    An evaluated step has two lines. If it was trained again, it is returned again.
    """
    file = run / "metrics.jsonl"
    # The driver may be writing the last line at this moment.
    text = file.read_text().rpartition("\n")[0] if file.exists() else ""
    steps: list[dict[str, Any]] = []
    for row in map(json.loads, text.splitlines()):
        if steps and steps[-1].pop("evaluation_follows", False):
            assert steps[-1]["step"] == row["step"]
            steps[-1] |= row
        else:
            steps.append(row)
    return steps
