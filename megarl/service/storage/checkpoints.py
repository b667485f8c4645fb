"""Checkpoints of the service on disk, by the SDK's names: tinker://RUN/weights/NAME and
tinker://RUN/sampler_weights/NAME.

RUN is a model's id. A checkpoint is a folder with a record of its owner. A folder without a record is incomplete.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from megarl.files.atomic import end_replacements, replace_folder, replace_text
from megarl.service.messages.requests import NAME
from megarl.service.refusals import NotFoundError, UserError
from megarl.service.storage.deletion import Report, delete_file, delete_tree
from megarl.terminal import FirstOfEachKind
from megarl.types import DataError, StorageError

_RUN = re.compile(r"^[a-z0-9]+:train:[0-9]+\Z")
_NAME = re.compile(NAME.removesuffix("$") + r"\Z")
KINDS = ("weights", "sampler_weights")
"""Kinds of checkpoints: to train on, and to sample from."""
_RECORD = "service.json"
_PARTIAL = ".partial_"
"""Prefix of the names of unfinished folders."""
# About 700 states of a 14B model with rank-32 adapters, 1.5 GB each.
MAX_BYTES = 2**40
"""Default of the maximum bytes of one account's checkpoints."""
# Every listing and every save reads all records of an account.
MAX_CHECKPOINTS = 2000
"""Maximum checkpoints of one account."""


class Stored(NamedTuple):
    """A complete checkpoint: its run, kind, name, SDK name, and record."""

    run: str
    kind: str
    name: str
    path: str
    record: dict[str, Any]


class Checkpoints:
    """The checkpoints in a folder. Each has an owner. One owner's checkpoints may have `max_bytes` together.

    `report` is called once with a sentence about each file that cannot be deleted.
    """

    def __init__(
        self,
        folder: Path,
        report: Report,
        clock: Callable[[], float] = time.time,
        *,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        reports = FirstOfEachKind(report)
        # Report each file once: `delete_expired` retries every half a minute.
        self._report: Report = lambda text: reports.tell(text, text)
        # Wall-clock time by default, so that expiry continues across restarts of the service.
        self._folder, self._clock, self._max_bytes = folder, clock, max_bytes
        self._readers: Counter[Path] = Counter()
        self._recover()

    def path_of(self, run: str, kind: str, name: str) -> str:
        return f"tinker://{run}/{kind}/{name}"

    def begin_checkpoint(self, run: str, kind: str, name: str, owner: str, *, overwrite: bool) -> Path:
        """Return a new empty folder for a checkpoint.

        Raises UserError if the name is in use, or the owner has reached a limit. Raises OSError if the disk is full.
        """
        folder = self._folder / run / kind / name
        if (folder / _RECORD).exists() and not overwrite:
            raise UserError(f"path = {name}: {self.path_of(run, kind, name)} exists; use another name, or overwrite")
        self._refuse_if_read(folder)
        checkpoints = self.list_stored(owner)
        num_bytes = sum(checkpoint.record["size_bytes"] for checkpoint in checkpoints)
        if num_bytes >= self._max_bytes or len(checkpoints) >= MAX_CHECKPOINTS:
            raise UserError(
                f"this key has {len(checkpoints)} checkpoints with {num_bytes / 2**30:.1f} GiB; the limits are "
                f"{MAX_CHECKPOINTS} and {self._max_bytes / 2**30:g} GiB. Delete some (RestClient.delete_checkpoint)"
            )
        # Clients' names cannot begin with a dot, so no request reaches an unfinished folder.
        unfinished_folder = self._folder / run / kind / f"{_PARTIAL}{secrets.token_hex(4)}"
        unfinished_folder.mkdir(parents=True)
        return unfinished_folder

    def complete_checkpoint(
        self, unfinished_folder: Path, name: str, record: dict[str, Any], ttl_seconds: int | None
    ) -> None:
        """Rename a written folder to `name`. It replaces an earlier checkpoint, and expires after `ttl_seconds`.

        `record` names its owner. Raises UserError if the earlier checkpoint is being read, and OSError if the disk is
        full. The earlier one then stays.
        """
        folder = unfinished_folder.with_name(name)
        self._refuse_if_read(folder)
        now = self._clock()
        times = {"time": now, "expires": None if ttl_seconds is None else now + ttl_seconds}
        size = sum(file.stat().st_size for file in unfinished_folder.rglob("*") if file.is_file())
        # Write the record before the rename, so that every named folder has an owner.
        replace_text(unfinished_folder / _RECORD, json.dumps(record | times | {"size_bytes": size}))
        replace_folder(unfinished_folder, folder)

    def find_checkpoint(self, path: str, owner: str) -> tuple[Path, dict[str, Any]]:
        """Return the folder and the record of an owner's checkpoint. Raises NotFoundError."""
        not_found = NotFoundError(f"path = {path:.200}: does not exist")
        path_parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(path_parts) != 3:
            raise not_found
        run_name, kind, name = path_parts
        # Check the client's text before it becomes a path.
        if not _RUN.match(run_name) or kind not in KINDS or not _NAME.match(name):
            raise not_found
        folder = self._folder / run_name / kind / name
        record = self._read_record(folder)
        # Foreign, expired and missing checkpoints get the same answer, so that names cannot be probed.
        if record is None or record.get("owner") != owner or self._is_expired(record):
            raise not_found
        return folder, record

    def list_stored(self, owner: str, run: str | None = None) -> list[Stored]:
        """Return an owner's checkpoints, newest first. `run` selects one run."""
        if run is not None and not _RUN.match(run):
            return []
        checkpoints = []
        for folder in self._folder.glob(f"{run or '*'}/*/[!.]*"):
            record = self._read_record(folder)
            if record is not None and record.get("owner") == owner and not self._is_expired(record):
                names = folder.parent.parent.name, folder.parent.name, folder.name
                checkpoints.append(Stored(*names, self.path_of(*names), record))
        return sorted(checkpoints, key=lambda checkpoint: (checkpoint.record["time"], checkpoint.path), reverse=True)

    def delete_checkpoint(self, path: str, owner: str) -> None:
        """Delete an owner's checkpoint. Raises NotFoundError, and UserError if it is being read or the disk fails."""
        folder, _ = self.find_checkpoint(path, owner)
        self._refuse_if_read(folder)
        if not self._remove_checkpoint(folder):
            raise UserError(f"path = {path}: was not deleted, because the disk of the service fails; try again later")

    def set_lifetime(self, path: str, owner: str, ttl_seconds: int | None) -> None:
        """Let an owner's checkpoint expire `ttl_seconds` from now; None: never.

        Raises NotFoundError, and OSError if the disk is full.
        """
        folder, record = self.find_checkpoint(path, owner)
        record["expires"] = None if ttl_seconds is None else self._clock() + ttl_seconds
        replace_text(folder / _RECORD, json.dumps(record))

    @contextmanager
    def keep_while_reading(self, folder: Path, saved_at: float) -> Iterator[None]:
        """Keep a checkpoint from deletion and replacement while ranks read it.

        `saved_at` is the time in its record. Raises NotFoundError if another checkpoint has replaced it. Raises
        UserError for damaged files and a failing disk.
        """
        path = self.path_of(folder.parent.parent.name, folder.parent.name, folder.name)
        record = self._read_record(folder)
        if record is None or record["time"] != saved_at:
            problem = "the checkpoint was deleted or replaced, or has expired; use another one"
            raise NotFoundError(f"{folder.name}: {problem}")
        self._readers[folder] += 1
        try:
            yield
        # These errors name folders of the service: only the operator may see them.
        except DataError as error:
            raise UserError(
                f"path = {path}: its files are damaged, or an earlier version of the service saved it. Load another "
                "checkpoint"
            ) from error
        except (OSError, StorageError) as error:
            raise UserError(
                f"path = {path}: the disk of the service fails. Load it again later, or another checkpoint"
            ) from error
        finally:
            self._readers[folder] -= 1

    def delete_expired(self) -> None:
        for record_file in self._folder.glob(f"*/*/*/{_RECORD}"):
            folder = record_file.parent
            record = self._read_record(folder)
            # One unreadable record must not keep other checkpoints from expiring.
            if record is not None and self._is_expired(record) and not self._readers[folder]:
                self._remove_checkpoint(folder)

    def _recover(self) -> None:
        """After a kill, complete or undo the replacement of checkpoints, and delete unfinished folders."""
        for kind_folder in self._folder.glob("*/*"):
            end_replacements(kind_folder)
        for unfinished_folder in self._folder.glob(f"*/*/{_PARTIAL}*"):
            self.discard(unfinished_folder)

    def discard(self, unfinished_folder: Path) -> None:
        delete_tree(unfinished_folder, self._report)

    def _remove_checkpoint(self, folder: Path) -> bool:
        # Delete the record first: a half-deleted folder then does not count as a checkpoint.
        if not delete_file(folder / _RECORD, self._report):
            return False
        delete_tree(folder, self._report)
        return True

    def _refuse_if_read(self, folder: Path) -> None:
        if self._readers[folder]:
            raise UserError(f"{folder.name}: this checkpoint is being loaded; try again when that has ended")

    def _read_record(self, folder: Path) -> dict[str, Any] | None:
        """Return a checkpoint's record; None: it is incomplete or unreadable."""
        try:
            record = json.loads((folder / _RECORD).read_text())
        except (OSError, ValueError):
            return None
        # Records of earlier versions lack time and size.
        return {"time": 0.0, "size_bytes": 0} | record if isinstance(record, dict) else None

    def _is_expired(self, record: dict[str, Any]) -> bool:
        expires = record.get("expires")
        return expires is not None and expires <= self._clock()
