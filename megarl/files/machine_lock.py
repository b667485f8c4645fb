"""A lock between one user's processes on one machine."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class MachineLock:
    """The lock of a file, free until `acquire`. `close` and the end of its context or process free it again."""

    def __init__(self, path: Path, *, creates: bool = True) -> None:
        """Open the file, or create it if `creates`. Raises OSError for a link and for another user's file."""
        # O_NOFOLLOW: a link with this name could point to any file.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if creates else 0), 0o600)
        # Another user could hold the lock forever.
        if os.fstat(self._file).st_uid != os.getuid():
            self.close()
            raise PermissionError(f"{path} belongs to another user")

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def acquire(self) -> bool:
        """Lock the file. Returns whether this process now has the lock."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        if self.is_open:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> MachineLock:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()
