"""A private temporary folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from megarl.files.machine_lock import MachineLock

_PREFIX = "megarl-run-"
_ENDED_PREFIX = "megarl-ended-"
"""Begins the name of a folder while it is removed. A process killed then leaves a folder without a lock."""
_LOCK = "lock"


class PrivateFolder:
    """A new folder with mode 0700 in `parent` (default: the system's temporary folder). It lasts until `remove`.

    As a context manager it returns the path, and removes the folder at the end.

    A killed process cannot remove its folder, but the kernel frees its file lock. The next PrivateFolder of the same
    user and parent on this machine removes all folders with a free lock.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Create a folder in `parent`, and delete folders left there by ended processes."""
        parent = parent or Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Lock the file before it gets its final name. Otherwise another process could see a free lock and remove it.
        unpublished_lock = self.path / f"{_LOCK}.new"
        self._lock = MachineLock(unpublished_lock)
        self._lock.acquire()
        unpublished_lock.rename(self.path / _LOCK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        if self._lock.is_open:
            _rename_and_delete(self.path)
            self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Delete this user's private folders whose process has ended: nobody holds their lock."""
    for folder in filter(_is_own_folder, parent.glob(f"{_ENDED_PREFIX}*")):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in filter(_is_own_folder, parent.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError), MachineLock(folder / _LOCK, creates=False) as lock:
            if lock.acquire():
                _rename_and_delete(folder)


def _is_own_folder(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    return False


def _rename_and_delete(folder: Path) -> None:
    """Rename a folder, then delete it. Without its usual name, no process sees it half deleted and without a lock."""
    with contextlib.suppress(OSError):
        ended_folder = folder.rename(folder.with_name(_ENDED_PREFIX + folder.name.removeprefix(_PREFIX)))
        shutil.rmtree(ended_folder, ignore_errors=True)
