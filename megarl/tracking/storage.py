"""Files of a run written whole or not at all, and faults of the storage below them told by path."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.types import DiskFullError, StorageError


@contextmanager
def storage_faults_named(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into StorageError, a full disk into DiskFullError; both name the path.

    `path` is named where the error itself names no file. Only file operations belong in the block: a lost connection
    is an OSError too.
    """
    try:
        yield
    except OSError as error:
        place = path if error.filename is None else error.filename
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"{place}: no room on its disk ({reason}). Make room there, then try again.") from None
        raise StorageError(
            f"{place}: cannot be read or written ({reason}). Check the disk and the permissions, then try again."
        ) from None


def replace_text(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, also after a power failure. Raises OSError."""
    replace_bytes(path, text.encode("utf-8"))


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, also after a power failure. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the disk hold a file's contents, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
