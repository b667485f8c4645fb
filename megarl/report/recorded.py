"""A run folder as recorded, even if files are missing or broken. This module only reads."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from megarl.files.atomic import storage_faults_named
from megarl.files.folder_lock import owner_is_gone
from megarl.files.plain_yaml import flatten_sections, read_mapping
from megarl.files.strict_json import MEDIUM, SMALL, loads
from megarl.tracking.earlier_run import EarlierRun, attempt_folders, whole_number
from megarl.tracking.step_lines import StepLine, join_steps
from megarl.types import ConfigError

_MARKS = ("config.yaml", "status.json", "metrics.jsonl")
"""A run folder has at least one of these files."""
_MOST_NOTICES = 50
"""Maximum number of warnings read from an attempt."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a run: its number, its recorded facts and its recipe.

    `record` has the contents of attempt.json; versions of megarl without the file leave it empty. `config` has the
    recipe fields by dotted name. `stacks` are files with stacks that a user requested.
    """

    number: int
    record: Mapping[str, Any]
    config: Mapping[str, Any]
    stacks: tuple[str, ...] = ()
    notices: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True)
class RecordedRun:
    """Run read from its folder.

    `rows`: steps of metrics.jsonl in order, each with its metrics; NaN for values that were not finite. `notes`:
    sentences about unreadable parts.
    """

    path: Path
    name: str
    status: Mapping[str, Any]
    config: Mapping[str, Any]
    """Fields of the run's recipe, keyed by dotted name."""
    rows: list[tuple[int, dict[str, float]]]
    attempts: list[Attempt]
    notes: list[str] = field(default_factory=list)
    checkpoints: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    """Names of the folders in `earlier/`: runs moved aside by --restart."""
    parent: str = ""
    """Origin of a forked run: its run and step, as text. Empty: it is not a fork."""

    @property
    def state(self) -> str:
        """State of the run in status.json. `ended unseen`: it is active by the file, but its process is gone."""
        return run_state(self.path, self.status)

    @property
    def step(self) -> int:
        logged = self.rows[-1][0] if self.rows else 0
        # status.json may be missing or older than the last logged step.
        return max(whole_number(self.status.get("step")), logged)

    @property
    def steps(self) -> int | None:
        """Planned number of steps, from the newest attempt or else the recipe. None: not known."""
        planned = [attempt.record.get("steps") for attempt in reversed(self.attempts)]
        numbers = [steps for steps in [*planned, self.config.get("train.steps")] if type(steps) is int and steps > 0]
        return numbers[0] if numbers else None

    @property
    def sample_files(self) -> list[tuple[int, Path]]:
        return step_files(self.path / "samples")

    @property
    def token_files(self) -> list[tuple[int, Path]]:
        return step_files(self.path / "tokens")


def read_run(path: Path) -> RecordedRun:
    """Read a run folder. Raises ConfigError for other folders, StorageError if it cannot be read."""
    refuse_other_folders(path)
    earlier = EarlierRun.read(path)
    notes: list[str] = []
    config = flatten_sections(earlier.recipe())
    if not config:
        notes.append("config.yaml is missing or cannot be read: the recipe is not shown.")
    if not earlier.status:
        notes.append("status.json is missing or cannot be read: the state of the run is not known.")
    with storage_faults_named(path):
        rows = _rows(path / "metrics.jsonl", notes)
        return RecordedRun(
            path=path,
            name=str(config.get("name") or path.resolve().name),
            status=earlier.status,
            config=config,
            rows=rows,
            attempts=_attempts(path / "logs"),
            notes=notes,
            checkpoints=tuple(folder.name for folder in reversed(earlier.checkpoints)),
            damaged=tuple(folder.name for folder in earlier.damaged),
            earlier=_names(path / "earlier"),
            parent=_parent_text(earlier),
        )


def refuse_other_folders(path: Path) -> None:
    """Raise ConfigError unless the path is a run folder. If it contains run folders, the error names them."""
    if any((path / name).is_file() for name in _MARKS):
        return
    if not path.exists():
        raise ConfigError(f"{path}: there is no such folder; give the folder of a run, such as runs/NAME")
    if not path.is_dir():
        raise ConfigError(f"{path}: this is a file; give the folder of a run, such as runs/NAME")
    with storage_faults_named(path):
        inside = [name for name in _names(path) if any((path / name / mark).is_file() for mark in _MARKS)]
    contents = f"; it holds the runs {', '.join(inside[:8])}" if inside else ""
    raise ConfigError(
        f"{path}: this is not a run folder, because it has none of {', '.join(_MARKS)}{contents}. Give runs/NAME"
    )


def _parent_text(earlier: EarlierRun) -> str:
    parent = earlier.parent()
    return f"{parent.get('name')} at step {parent.get('step')} ({parent.get('run')})" if parent else ""


def run_state(path: Path, status: Mapping[str, Any]) -> str:
    """Return the state of a run; see `RecordedRun.state`."""
    state = str(status.get("state") or "unknown")
    return "ended unseen" if state in ("starting", "running") and owner_is_gone(path) else state


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among the lines of a file. Other lines are skipped."""
    with path.open("rb") as file:
        for line in file:
            if isinstance(value := parsed_line(line, MEDIUM), dict):
                yield value


class Named(Protocol):
    """A run or an evaluation, read from a folder with a name."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...


def distinct_labels(runs: Sequence[Named]) -> list[str]:
    """Return a unique label for each run: its name, after as many of its parent folders as needed."""
    labels = [run.name for run in runs]
    depth = 1
    # Six parts of a path are long enough for a label; then numbers make it unique.
    while len(set(labels)) < len(labels) and depth < 6:
        depth += 1
        paths = [run.path.resolve().parts[-depth:] for run in runs]
        labels = [
            "/".join(parts) if labels.count(label) > 1 else label for parts, label in zip(paths, labels, strict=True)
        ]
    return [f"{label} ({number})" if labels.count(label) > 1 else label for number, label in enumerate(labels, 1)]


def parsed_line(line: bytes, max_values: int = SMALL) -> Any:
    """Return the JSON value of a line, None if it is not valid JSON or has more than `max_values` values."""
    try:
        return loads(line, max_values)
    except ValueError:
        return None


def _rows(path: Path, notes: list[str]) -> list[tuple[int, dict[str, float]]]:
    """Return the steps in metrics.jsonl. Adds notes about unreadable lines."""
    lines: list[StepLine] = []
    unreadable = 0
    try:
        with path.open("rb") as file:
            for content in filter(bytes.strip, file):
                if line := StepLine.read(content, SMALL):
                    lines.append(line)
                elif content.endswith(b"\n") or parsed_line(content) is not None:
                    unreadable += 1
                else:
                    # A running or killed process may leave half a line at the end.
                    notes.append("The last line of metrics.jsonl is cut short; it is left out.")
    except FileNotFoundError:
        notes.append("metrics.jsonl is not there yet: no step was logged.")
        return []
    if unreadable:
        notes.append(f"{unreadable} lines of metrics.jsonl cannot be read; they are left out.")
    # If a step occurs twice, it was trained again, so the last one counts.
    return sorted({step.step: dict(step.metrics) for step in join_steps(lines)}.items())


def _attempts(logs: Path) -> list[Attempt]:
    attempts = []
    for number, folder in attempt_folders(logs):
        stacks = tuple(file for file in _names(folder) if "stack" in file)
        config = flatten_sections(mapping_or_empty(folder / "config.yaml"))
        attempts.append(Attempt(number, object_or_empty(folder / "attempt.json"), config, stacks, _notices(folder)))
    return attempts


def _notices(folder: Path) -> tuple[Mapping[str, Any], ...]:
    try:
        return tuple(itertools.islice(json_lines(folder / "notices.jsonl"), _MOST_NOTICES))
    except OSError:
        return ()


def object_or_empty(path: Path, max_values: int = SMALL) -> dict[str, Any]:
    """Return the JSON object in a file. {} if it is missing, broken, or has more than `max_values` values."""
    try:
        value = parsed_line(path.read_bytes(), max_values)
    except OSError:
        return {}
    return value if isinstance(value, dict) else {}


def mapping_or_empty(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. {} if it is missing, broken or too large."""
    try:
        return read_mapping(path.read_bytes())
    except OSError:
        return {}


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError):
        return ()


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the files step_N.jsonl of a folder with their steps, in order."""
    matches = [(re.fullmatch(r"step_(\d+)\.jsonl", name), name) for name in _names(folder)]
    return sorted((int(match[1]), folder / name) for match, name in matches if match)


def now_text() -> str:
    return datetime.now().astimezone().isoformat(" ", "seconds")
