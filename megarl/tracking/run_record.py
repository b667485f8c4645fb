"""Reader of a run folder, even if files are missing or broken. It never writes."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from megarl.files.atomic import raise_storage_errors
from megarl.files.folder_lock import owner_is_gone
from megarl.files.plain_yaml import flatten_sections, read_mapping
from megarl.files.record_files import (
    json_lines,
    list_numbered,
    mapping_or_empty,
    names_in,
    object_or_empty,
    parsed_object,
    parsed_value,
    read_or_none,
)
from megarl.files.strict_json import MEDIUM, SMALL
from megarl.tracking.step_lines import StepLine, join_steps
from megarl.types import ConfigError, DataError

SCHEMA = 6
"""Version of the recipe's field names and of the driver's state in checkpoints. Other versions cannot be resumed."""

DRIVER = "driver.json"
"""File inside a checkpoint: the driver's state."""

PARENT = "parent.json"
"""File in a fork's folder: the original run and the step."""

_CHECKPOINT = re.compile(r"step_(\d{6,})")
_DAMAGED = re.compile(r"step_\d{6,}\.damaged(_\d+)?")


_MARKING_FILES = ("config.yaml", "status.json", "metrics.jsonl")
"""A run folder has at least one of these files."""
_MAX_NOTICES = 50
"""Maximum number of warnings read per start."""


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One start of a run: its number, its recorded facts and its recipe.

    `facts` is the content of attempt.json; empty if an earlier version wrote none. `config` has the recipe fields by
    dotted name. `stacks` are files of stacks requested by a user.
    """

    number: int
    facts: Mapping[str, Any]
    config: Mapping[str, Any]
    stacks: tuple[str, ...] = ()
    notices: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def read(cls, start_number: int, folder: Path) -> Self:
        try:
            notices = tuple(itertools.islice(json_lines(folder / "notices.jsonl"), _MAX_NOTICES))
        except OSError:
            notices = ()
        return cls(
            start_number,
            object_or_empty(folder / "attempt.json"),
            flatten_sections(mapping_or_empty(folder / "config.yaml")),
            tuple(file for file in names_in(folder) if "stack" in file),
            notices,
        )


@dataclass(frozen=True)
class RunRecord:
    """A run folder. Status and checkpoints are read at once, everything else when needed.

    `status` is empty if status.json is missing or is not a JSON object.
    """

    path: Path
    status: Mapping[str, Any]
    has_status: bool
    checkpoints: tuple[Path, ...]
    """Complete checkpoints, newest first. Their files may still be damaged."""
    damaged: tuple[Path, ...]
    """Checkpoints found damaged and renamed by earlier starts."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the state of a run folder. It need not exist. Raises StorageError if it is unreadable."""
        home = path / "checkpoints"
        with raise_storage_errors(path):
            content = read_or_none(path / "status.json")
            folders = _list_folders(home)
        return cls(
            path,
            parsed_object(content, MEDIUM),
            content is not None,
            tuple(sorted(filter(is_checkpoint, folders), key=checkpoint_step, reverse=True)),
            tuple(sorted(folder for folder in folders if _DAMAGED.fullmatch(folder.name))),
        )

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a run folder named in a command. Raises ConfigError for other folders (`refuse_other_folders`)."""
        refuse_other_folders(path)
        return cls.read(path)

    @classmethod
    def open_of_this_version(cls, path: Path) -> Self:
        """Read a run folder that a command will change. Raises DataError if a newer megarl wrote it last."""
        record = cls.open(path)
        record.refuse_newer_version()
        return record

    @property
    def step(self) -> int:
        return whole_number(self.status.get("step"))

    @property
    def last_step(self) -> int:
        """Return the last step in status.json or the metrics: status.json may be missing or old."""
        return max(self.step, self.rows[-1][0] if self.rows else 0)

    @property
    def planned_steps(self) -> int | None:
        """Return the planned number of steps, from the newest start or else the recipe. None: unknown."""
        counts = [*(start.facts.get("steps") for start in reversed(self.starts)), self.config.get("train.steps")]
        return next((count for count in counts if type(count) is int and count > 0), None)

    @property
    def state(self) -> str:
        """Return the state in status.json. `ended unseen`: the file says running, but the process is gone."""
        return run_state(self.path, self.status)

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.path.resolve().name)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Return the fields of the run's recipe by dotted name. Empty: config.yaml cannot be read."""
        return flatten_sections(self.recipe())

    @cached_property
    def starts(self) -> tuple[StartRecord, ...]:
        with raise_storage_errors(self.path):
            return tuple(StartRecord.read(number, folder) for number, folder in attempt_folders(self.path / "logs"))

    @property
    def rows(self) -> list[tuple[int, dict[str, float]]]:
        return self._rows_and_notes[0]

    @property
    def notes(self) -> list[str]:
        """Return sentences about unreadable parts of the folder."""
        notes = []
        if not self.config:
            notes.append("config.yaml is missing or cannot be read: the recipe is not shown.")
        if not self.status:
            notes.append("status.json is missing or cannot be read: the state of the run is not known.")
        return notes + self._rows_and_notes[1]

    @cached_property
    def _rows_and_notes(self) -> tuple[list[tuple[int, dict[str, float]]], list[str]]:
        with raise_storage_errors(self.path):
            return _read_rows(self.path / "metrics.jsonl")

    @property
    def moved_aside(self) -> tuple[str, ...]:
        """Return the names of the folders in `earlier/`, the runs moved aside by --restart."""
        with raise_storage_errors(self.path):
            return names_in(self.path / "earlier")

    @property
    def origin(self) -> str:
        parent = self.parent()
        return f"{parent.get('name')} at step {parent.get('step')} ({parent.get('run')})" if parent else ""

    @property
    def sample_files(self) -> list[tuple[int, Path]]:
        return step_files(self.path / "samples")

    @property
    def token_files(self) -> list[tuple[int, Path]]:
        return step_files(self.path / "tokens")

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        """Return the names of faulty nodes in status.json. Raises DataError for other values."""
        names = self.status.get("bad_nodes", [])
        place = f"{self.path / 'status.json'}: bad_nodes"
        if not isinstance(names, list):
            raise DataError(f"{place} = {names!r:.80}: is not a list of nodes; write one, or remove the field")
        for name in names:
            if not isinstance(name, str) or not name.isprintable() or not name:
                raise DataError(f"{place} = {name!r:.80}: is not the name of a node; remove the entry")
        return tuple(names)

    def recipe(self) -> dict[str, Any]:
        """Return the recipe of the newest start (config.yaml) as JSON values. Empty: it cannot be read."""
        with raise_storage_errors(self.path):
            content = read_or_none(self.path / "config.yaml")
        return read_mapping(content or b"")

    def refuse_new_start(self) -> None:
        """Raise ConfigError if a start from the beginning would overwrite an earlier start's trained steps."""
        if self.checkpoints or self.damaged:
            checkpoint_names = ", ".join(folder.name for folder in (*self.checkpoints, *self.damaged))
            state = f"with checkpoints ({checkpoint_names})"
        # A broken status.json may hide a finished run, so refuse to start over it.
        elif self.has_status and "state" not in self.status:
            state = "whose status.json cannot be read"
        elif self.step > 0 or self.status.get("state") == "done":
            state = f"which is {self.status['state']} at step {self.step}"
        else:
            return
        raise ConfigError(
            f"name: {self.path} already holds a run, {state}. Choose another with name=NAME, continue this one with "
            "--resume, or start over with --restart, which moves the old run to earlier/."
        )

    def finished_text(self, steps: int) -> str | None:
        if self.status.get("state") != "done" or self.step < steps:
            return None
        return (
            f"{self.path} is finished (step {self.step} of {steps}): nothing is changed. To train on, raise "
            "train.steps; to start over, choose another name=NAME or give --restart."
        )

    def refuse_newer_version(self) -> None:
        """Raise DataError if a newer megarl wrote the run folder last: this version may not know all fields and
        files.
        """
        _refuse_newer(self.path, _read_writer_version(self.path))

    def checkpoint(self, step: int) -> Path:
        """Return the checkpoint of a step. Raises ConfigError, naming the steps with a checkpoint."""
        for folder in self.checkpoints:
            if checkpoint_step(folder) == step:
                return folder
        steps = ", ".join(str(checkpoint_step(folder)) for folder in reversed(self.checkpoints))
        remedy = f"it has the steps {steps}" if steps else "set checkpoint.every_steps so that a run saves"
        raise ConfigError(f"--step {step}: {self.path} has no checkpoint of this step; {remedy}")

    def parent(self) -> dict[str, Any]:
        """Return the original run and step of a fork (parent.json). Empty: the run is not a fork."""
        with raise_storage_errors(self.path):
            return parsed_object(read_or_none(self.path / PARENT), MEDIUM)

    def require_checkpoint(self) -> None:
        """Raise ConfigError if the folder has no checkpoint."""
        if not self.checkpoints and not self.damaged:
            raise ConfigError(
                f"--resume=must: {self.path} has no checkpoint to continue from. Check name and runs_folder; --resume "
                "alone would start from the beginning."
            )

    def refuse_start_over(self) -> None:
        """Raise DataError if checkpoints exist but none can be loaded: the run must not silently start anew."""
        if self.checkpoints or self.damaged:
            raise DataError(
                f"{self.path / 'checkpoints'}: none of the run's {len(self.checkpoints) + len(self.damaged)} "
                "checkpoints can be loaded. Restore one from a copy, or start over with --restart, which moves the "
                "old run to earlier/."
            )


def refuse_other_schema(checkpoint: Path) -> None:
    """Raise DataError for a checkpoint of another schema version. Other checks report unreadable checkpoints."""
    with raise_storage_errors(checkpoint):
        content = read_or_none(checkpoint / DRIVER)
    if not (driver := parsed_object(content, MEDIUM)):
        return
    # The first schema has no number.
    schema = driver.get("schema", 1)
    if schema != SCHEMA:
        _refuse_newer(checkpoint, _read_writer_version(checkpoint.parents[1]))
        raise DataError(
            f"{checkpoint}: the checkpoint has schema {schema}, but this version of megarl reads schema {SCHEMA}. "
            "Continue with the version that wrote it, or start over with --restart, which moves the old run to "
            "earlier/. To begin with its weights, set model.path to a run's folder hf/."
        )


def is_checkpoint(folder: Path) -> bool:
    return _CHECKPOINT.fullmatch(folder.name) is not None


def newest_checkpoint(path: Path) -> Path | None:
    """Return `path` itself if it is a checkpoint, else the newest checkpoint of the run at `path`, or None.

    A run is a run folder or its checkpoints/ folder.
    """
    if is_checkpoint(path) and path.is_dir():
        return path
    run = path.parent if path.name == "checkpoints" else path
    return next(iter(RunRecord.read(run).checkpoints), None)


def checkpoint_step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def attempt_folders(logs: Path) -> list[tuple[int, Path]]:
    """Return a run's starts in its `logs/`, in order: number and folder. Raises OSError."""
    return list_numbered(logs, r"attempt_(\d+)")


def step_files(folder: Path) -> list[tuple[int, Path]]:
    return list_numbered(folder, r"step_(\d+)\.jsonl")


def refuse_other_folders(path: Path) -> None:
    """Raise ConfigError unless the path is a run folder. The message names run folders inside it."""
    if any((path / name).is_file() for name in _MARKING_FILES):
        return
    if not path.exists():
        raise ConfigError(f"{path}: there is no such folder; give the folder of a run, such as runs/NAME")
    if not path.is_dir():
        raise ConfigError(f"{path}: this is a file; give the folder of a run, such as runs/NAME")
    with raise_storage_errors(path):
        run_names = [name for name in names_in(path) if any((path / name / mark).is_file() for mark in _MARKING_FILES)]
    hint = f"; it holds the runs {', '.join(run_names[:8])}" if run_names else ""
    raise ConfigError(
        f"{path}: this is not a run folder, because it has none of {', '.join(_MARKING_FILES)}{hint}. Give runs/NAME"
    )


def run_state(path: Path, status: Mapping[str, Any]) -> str:
    state = str(status.get("state") or "unknown")
    return "ended unseen" if state in ("starting", "running") and owner_is_gone(path) else state


def _read_rows(path: Path) -> tuple[list[tuple[int, dict[str, float]]], list[str]]:
    """Return the steps in metrics.jsonl, and notes about unreadable lines."""
    notes: list[str] = []
    lines: list[StepLine] = []
    num_unreadable = 0
    try:
        with path.open("rb") as file:
            for content in filter(bytes.strip, file):
                if line := StepLine.read(content, SMALL):
                    lines.append(line)
                elif content.endswith(b"\n") or parsed_value(content) is not None:
                    num_unreadable += 1
                else:
                    # A running or killed process may leave half a line at the end.
                    notes.append("The last line of metrics.jsonl is cut short; it is left out.")
    except FileNotFoundError:
        notes.append("metrics.jsonl is not there yet: no step was logged.")
        return [], notes
    if num_unreadable:
        notes.append(f"{num_unreadable} lines of metrics.jsonl cannot be read; they are left out.")
    # A step occurs twice if it was trained again. The last one counts.
    return sorted({step.step: dict(step.metrics) for step in join_steps(lines)}.items()), notes


def _read_writer_version(run: Path) -> str | None:
    """Return the version of megarl at a run's newest start. None: unknown."""
    with raise_storage_errors(run):
        newest_starts = [folder for _, folder in attempt_folders(run / "logs")][-1:]
        content = read_or_none(newest_starts[0] / "attempt.json") if newest_starts else None
    versions = parsed_object(content, MEDIUM).get("versions")
    writer_version = versions.get("megarl") if isinstance(versions, Mapping) else None
    return writer_version if isinstance(writer_version, str) else None


def _refuse_newer(folder: Path, writer_version: str | None) -> None:
    """Raise DataError if `writer_version`, the version that wrote a folder, is newer than this megarl."""
    # Imported here, because few commands compare versions.
    from packaging.version import InvalidVersion, Version

    installed_version = version("megarl")
    try:
        is_newer = writer_version is not None and Version(writer_version) > Version(installed_version)
    except InvalidVersion:
        return
    if is_newer:
        raise DataError(
            f"{folder}: was written by megarl {writer_version}, but this is megarl {installed_version}, which may not "
            f"know all of its fields. Install megarl {writer_version} or newer, then repeat the command."
        )


def whole_number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _list_folders(folder: Path) -> list[Path]:
    """Return the folders inside a folder. Raises OSError if it is unreadable: Path.glob would return nothing."""
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
