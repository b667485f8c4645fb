"""Temporary folders on storage that several machines share."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

_ABANDONED_SECONDS = 24 * 3600.0
"""A folder of this age in seconds was left by a killed process. A doctor or a replay takes minutes."""


@contextlib.contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Create a temporary folder in `parent` whose name begins with `prefix`, and remove it at the end of the context.

    A killed process leaves its folder behind. So first remove this user's folders with the same prefix that are older
    than a day. A lock would show sooner that an owner is dead, but some shared storage has no locks between machines.
    """
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
    # Another node's files may appear during the removal (NFS keeps files that are still open).
    with TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True) as name:
        yield Path(name)
