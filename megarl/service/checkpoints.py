"""Checkpoints of the service on disk, by the SDK's names: tinker://RUN/weights/NAME and tinker://RUN/sampler_weights/NAME.

RUN is a model's id. Each checkpoint is a folder with a record of its owner; without the record it is incomplete.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.files.atomic import replace_text
from megarl.service.refusals import NotFoundError, UserError
from megarl.service.requests import NAME

_RUN = re.compile(r"^[a-z0-9]+:train:[0-9]+$")
KINDS = ("weights", "sampler_weights")
"""Kinds of checkpoints: to train on, and to sample from."""
_RECORD = "service.json"


class Checkpoints:
    """The checkpoints in a folder, each with an owner."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        # The clock is wall-clock time by default: expiry continues across restarts of the service.
        self._folder, self._clock = folder, clock

    def path_of(self, run: str, kind: str, name: str) -> str:
        """Return the SDK's name of a checkpoint."""
        return f"tinker://{run}/{kind}/{name}"

    def begin(self, run: str, kind: str, name: str, *, overwrite: bool) -> Path:
        """Return a new empty folder for a checkpoint. Raises UserError if the name is in use."""
        if (self._folder / run / kind / name / _RECORD).exists() and not overwrite:
            raise UserError(f"path = {name}: {self.path_of(run, kind, name)} exists; use another name, or overwrite")
        # Names of clients cannot begin with a dot, so no request reaches an unfinished folder.
        partial = self._folder / run / kind / f".partial_{secrets.token_hex(4)}"
        partial.mkdir(parents=True)
        return partial

    def complete(self, partial: Path, name: str, record: dict[str, Any], ttl_seconds: int | None) -> None:
        """Give a written folder its name, in place of an earlier checkpoint. `record` has its owner."""
        expires = None if ttl_seconds is None else self._clock() + ttl_seconds
        # The record comes before the rename, so every named folder has an owner.
        replace_text(partial / _RECORD, json.dumps(record | {"expires": expires}))
        folder = partial.with_name(name)
        earlier = partial.with_name(f".old_{secrets.token_hex(4)}")
        # A rename cannot replace a folder with files, so the earlier checkpoint moves away first.
        if folder.exists():
            folder.rename(earlier)
        partial.rename(folder)
        shutil.rmtree(earlier, ignore_errors=True)

    def find(self, path: str, owner: str) -> tuple[Path, dict[str, Any]]:
        """Return the folder and the record of an owner's checkpoint. Raises NotFoundError."""
        missing = NotFoundError(f"path = {path:.200}: does not exist")
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3:
            raise missing
        run, kind, name = parts
        # Checked before it becomes a path: the text is a client's.
        if not _RUN.match(run) or kind not in KINDS or not re.match(NAME, name):
            raise missing
        folder = self._folder / run / kind / name
        try:
            record = json.loads((folder / _RECORD).read_text())
        except (OSError, ValueError) as error:
            raise missing from error
        expires = record.get("expires")
        # Foreign, expired and missing checkpoints have one answer, so that names cannot be probed.
        if record.get("owner") != owner or (expires is not None and expires <= self._clock()):
            raise missing
        return folder, record

    def delete_expired(self) -> None:
        """Delete expired checkpoints."""
        for record_file in self._folder.glob(f"*/*/*/{_RECORD}"):
            try:
                expires = json.loads(record_file.read_text()).get("expires")
            except (OSError, ValueError):
                # One unreadable record must not keep the others from expiring.
                continue
            if expires is not None and expires <= self._clock():
                shutil.rmtree(record_file.parent, ignore_errors=True)
