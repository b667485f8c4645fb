"""Replays of a run's steps (`megarl replay --html`): their files in the run folder, and their part of a report."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.files.atomic import raise_storage_errors, replace_text
from megarl.files.strict_json import MEDIUM, loads
from megarl.report.labels import now_text
from megarl.report.sample_text import shortened_text

REPLAYS = "replays"

_MOST = 20
"""Maximum number of replays on a page. Later steps come first."""
_MOST_SAMPLES = 512
_MOST_LINES = 200
_LINE = 400


def write_replay(
    run: Path,
    step: int,
    lines: Sequence[str],
    changes: Sequence[str] = (),
    metrics: Mapping[str, tuple[float, float]] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the results of a replay into the run's `replays/`. An earlier replay with the same changes is replaced.

    `lines` say for each step whether it was equal. `metrics` are pairs: (in the run, with the changes). `samples` have
    equal keys, with numbers or such pairs. Returns the file. Raises StorageError.
    """
    folder = run / REPLAYS
    number = zlib.crc32("\n".join(changes).encode())
    file = folder / (f"step_{step:06d}_{number:08x}.json" if changes else f"step_{step:06d}.json")
    content = {
        "step": step, "made": now_text(), "lines": list(lines), "changes": list(changes),
        "metrics": {name: _finite_or_none(pair) for name, pair in (metrics or {}).items()},
        "samples": [{name: _finite_or_none(value) for name, value in sample.items()} for sample in samples],
    }  # fmt: skip
    with raise_storage_errors(folder):
        folder.mkdir(exist_ok=True)
        replace_text(file, json.dumps(content, indent=1) + "\n")
    return file


def replay_contents(run: Path) -> list[dict[str, Any]]:
    """Return the page's content about a run's replays, later steps first. Unreadable files are left out."""
    contents = []
    for file in sorted((run / REPLAYS).glob("step_*.json"), reverse=True)[:_MOST]:
        try:
            contents.append(_format_replay(loads(file.read_bytes(), MEDIUM)))
        # Anybody may have written the file, so also reject infinite numbers and deep nesting.
        except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            continue
    return contents


def _format_replay(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts of one replay. Raises an error if the file has another structure."""
    samples = recorded["samples"][:_MOST_SAMPLES]
    omission = (
        [] if samples == recorded["samples"] else [f"the first {_MOST_SAMPLES} of {len(recorded['samples'])} samples"]
    )
    columns = [shortened_text(str(name), 80) for name in (samples[0] if samples else {})]
    return {
        "title": f"Step {int(recorded['step'])}",
        "made": shortened_text(str(recorded["made"]), 80),
        "lines": [shortened_text(str(line), _LINE) for line in recorded["lines"][:_MOST_LINES]] + omission,
        "changes": [shortened_text(str(change), _LINE) for change in recorded["changes"]],
        "metrics": [
            [shortened_text(str(name), 80), *map(_format_value, pair)] for name, pair in recorded["metrics"].items()
        ],
        "columns": columns,
        "rows": [[_format_value(value) for value in sample.values()] for sample in samples],
    }


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        in_run, with_changes = value
        text = _format_value(in_run)
        return text if in_run == with_changes else f"{text} → {_format_value(with_changes)}"
    return "no number" if value is None else f"{float(value):.5g}"


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_finite_or_none(number) for number in value]
    return value if math.isfinite(value) else None
