"""State of a run folder left by an earlier start of the run. This module only reads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from megarl.files.atomic import storage_faults_named
from megarl.files.plain_yaml import read_mapping
from megarl.files.strict_json import MEDIUM, loads
from megarl.types import ConfigError, DataError

SCHEMA = 6
"""Version of the recipe's field names and of the driver's state in checkpoints. Other versions cannot be resumed."""

DRIVER = "driver.json"
"""Name of the file with the driver's state inside a checkpoint."""

PARENT = "parent.json"
"""Name of the file in a fork's folder with its original run and step."""

_CHECKPOINT = re.compile(r"step_(\d{6,})")
_DAMAGED = re.compile(r"step_\d{6,}\.damaged(_\d+)?")


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run folder before a start. `status` is empty if status.json is missing or is not a JSON object."""

    path: Path
    status: Mapping[str, Any]
    has_status: bool
    checkpoints: tuple[Path, ...]
    """Complete checkpoints, newest first. Their files may still be damaged."""
    damaged: tuple[Path, ...]
    """Checkpoints found damaged and renamed by earlier starts."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the state of a run folder, which need not exist. Raises StorageError if it cannot be read."""
        home = path / "checkpoints"
        with storage_faults_named(path):
            content = _content(path / "status.json")
            folders = _folders(home)
        return cls(
            path,
            _as_object(content),
            content is not None,
            tuple(sorted(filter(is_checkpoint, folders), key=checkpoint_step, reverse=True)),
            tuple(sorted(folder for folder in folders if _DAMAGED.fullmatch(folder.name))),
        )

    @property
    def step(self) -> int:
        """Last trained step in status.json."""
        return whole_number(self.status.get("step"))

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        """Names of faulty nodes in status.json (see `types.FaultyNodeError`). Raises DataError for other values."""
        names = self.status.get("bad_nodes", [])
        place = f"{self.path / 'status.json'}: bad_nodes"
        if not isinstance(names, list):
            raise DataError(f"{place} = {names!r:.80}: is not a list of nodes; write one, or remove the field")
        for name in names:
            if not isinstance(name, str) or not name.isprintable() or not name:
                raise DataError(f"{place} = {name!r:.80}: is not the name of a node; remove the entry")
        return tuple(names)

    def recipe(self) -> dict[str, Any]:
        """Return the earlier start's recipe (config.yaml) as JSON values, {} if it cannot be read."""
        with storage_faults_named(self.path):
            content = _content(self.path / "config.yaml")
        return read_mapping(content or b"")

    def refuse_new_start(self) -> None:
        """Raise ConfigError if starting from the beginning would overwrite the trained steps of an earlier run."""
        if self.checkpoints or self.damaged:
            checkpoint_names = ", ".join(folder.name for folder in (*self.checkpoints, *self.damaged))
            state = f"with checkpoints ({checkpoint_names})"
        # A broken status.json may hide a finished run, so a start over it is refused too.
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
        """Return a message if the run has already trained at least `steps` steps, else None."""
        if self.status.get("state") != "done" or self.step < steps:
            return None
        return (
            f"{self.path} is finished (step {self.step} of {steps}): nothing is changed. To train on, raise "
            "train.steps; to start over, choose another name=NAME or give --restart."
        )

    def refuse_newer_version(self) -> None:
        """Raise DataError if a newer version of megarl wrote the run folder last.

        It may have fields and files unknown here.
        """
        _refuse_newer(self.path, _written_by(self.path))

    def checkpoint(self, step: int) -> Path:
        """Return the checkpoint of a step. Raises ConfigError with the steps of the others if there is none."""
        for folder in self.checkpoints:
            if checkpoint_step(folder) == step:
                return folder
        steps = ", ".join(str(checkpoint_step(folder)) for folder in reversed(self.checkpoints))
        remedy = f"it has the steps {steps}" if steps else "set checkpoint.every_steps so that a run saves"
        raise ConfigError(f"--step {step}: {self.path} has no checkpoint of this step; {remedy}")

    def parent(self) -> dict[str, Any]:
        """Return the run and the step from which this run was forked (parent.json), {} if it is not a fork."""
        with storage_faults_named(self.path):
            return _as_object(_content(self.path / PARENT))

    def require_checkpoint(self) -> None:
        """Raise ConfigError if the folder has no checkpoint to resume from."""
        if not self.checkpoints and not self.damaged:
            raise ConfigError(
                f"--resume=must: {self.path} has no checkpoint to continue from. Check name and runs_folder; --resume "
                "alone would start from the beginning."
            )

    def refuse_start_over(self) -> None:
        """Raise DataError if checkpoints exist but none can be loaded. The run does not silently start from the
        beginning."""
        if self.checkpoints or self.damaged:
            raise DataError(
                f"{self.path / 'checkpoints'}: none of the run's {len(self.checkpoints) + len(self.damaged)} "
                "checkpoints can be loaded. Restore one from a copy, or start over with --restart, which moves the "
                "old run to earlier/."
            )


def refuse_other_schema(checkpoint: Path) -> None:
    """Raise DataError for a checkpoint with another schema version. Unreadable checkpoints are left to other checks."""
    with storage_faults_named(checkpoint):
        content = _content(checkpoint / DRIVER)
    if not (driver := _as_object(content)):
        return
    # The first schema did not write its number.
    schema = driver.get("schema", 1)
    if schema != SCHEMA:
        _refuse_newer(checkpoint, _written_by(checkpoint.parents[1]))
        raise DataError(
            f"{checkpoint}: the checkpoint has schema {schema}, but this version of megarl reads schema {SCHEMA}. "
            "Continue with the version that wrote it, or start over with --restart, which moves the old run to "
            "earlier/. To begin with its weights, set model.path to a run's folder hf/."
        )


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is named like a checkpoint."""
    return _CHECKPOINT.fullmatch(folder.name) is not None


def newest_checkpoint(path: Path) -> Path | None:
    """Return `path` itself if it is a checkpoint, else the newest checkpoint of the run at `path`. None: there is none.

    A run is given by its folder or by its checkpoints/ folder.
    """
    if is_checkpoint(path) and path.is_dir():
        return path
    run = path.parent if path.name == "checkpoints" else path
    return next(iter(EarlierRun.read(run).checkpoints), None)


def checkpoint_step(folder: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(folder.name.removeprefix("step_"))


def attempt_folders(logs: Path) -> list[tuple[int, Path]]:
    """Return the folders of a run's attempts in its `logs/` with their numbers, in order. Raises OSError."""
    try:
        names = os.listdir(logs)
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = [(re.fullmatch(r"attempt_(\d+)", name), name) for name in names]
    return sorted((int(match[1]), logs / name) for match, name in matches if match)


def _written_by(run: Path) -> str | None:
    """Return the version of megarl at the newest start of a run (logs/attempt_N/attempt.json), None if unknown."""
    with storage_faults_named(run):
        newest = [folder for _, folder in attempt_folders(run / "logs")][-1:]
        content = _content(newest[0] / "attempt.json") if newest else None
    versions = _as_object(content).get("versions")
    written_by = versions.get("megarl") if isinstance(versions, Mapping) else None
    return written_by if isinstance(written_by, str) else None


def _refuse_newer(place: Path, theirs: str | None) -> None:
    """Raise DataError if `theirs`, the version of megarl that wrote a folder, is newer than this one."""
    # Imported here: few commands compare versions.
    from packaging.version import InvalidVersion, Version

    own_version = version("megarl")
    try:
        is_newer = theirs is not None and Version(theirs) > Version(own_version)
    except InvalidVersion:
        return
    if is_newer:
        raise DataError(
            f"{place}: was written by megarl {theirs}, but this is megarl {own_version}, which may not know all "
            f"of its fields. Install megarl {theirs} or newer, then repeat the command."
        )


def whole_number(value: Any) -> int:
    """Return an integer field of status.json, 0 if it has any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _content(path: Path) -> bytes | None:
    """Return the contents of a file, None if it is missing."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _as_object(content: bytes | None) -> dict[str, Any]:
    """Return the JSON object in `content`, {} if it is not one."""
    try:
        value = loads(content or b"{}", MEDIUM)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _folders(home: Path) -> list[Path]:
    """Return the folders inside a folder. Raises OSError if it cannot be read; Path.glob would return nothing."""
    try:
        with os.scandir(home) as entries:
            return [home / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
