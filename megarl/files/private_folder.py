"""A temporary folder of one process that only its user can read, and removed even after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

_PREFIX = "megarl-run-"
_LOCK = "lock"


class PrivateFolder:
    """A new folder with mode 0700 in the system's temporary folder. It lasts until `remove`.

    As a context manager it returns the path, and removes the folder at the end.

    A killed process cannot remove its folder, but the kernel frees its file lock. The next PrivateFolder of the same
    user on this machine removes all folders with a free lock.
    """

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Lock the file before it gets its final name. Otherwise another process could see a free lock and remove it.
        nameless = self.path / f"{_LOCK}.new"
        self._lock = os.open(nameless, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        nameless.rename(self.path / _LOCK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder and its contents. Further calls do nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's private folders whose processes have ended."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            # O_NOFOLLOW: a link with this name could point to any file.
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
