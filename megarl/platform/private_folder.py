"""A temporary folder of one process that only its user can read, and that is removed however the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "megarl-run-"
_LOCK = "lock"


class PrivateFolder:
    """A new folder of mode 0700 in the system's temporary folder, until `remove`.

    A process that is killed cannot remove its folder. The kernel frees the lock in it, by which the next folder that
    the same user makes on this machine knows it, and removes it.
    """

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Locked before it has the name by which others look for it.
        nameless = self.path / f"{_LOCK}.new"
        self._lock = os.open(nameless, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        nameless.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the folder and what is in it; may be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's private folders whose process has ended."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
