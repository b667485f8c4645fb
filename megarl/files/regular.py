"""Checks that a path is a regular file before it is opened. Opening a named pipe would wait forever for a writer."""

from __future__ import annotations

from pathlib import Path

from megarl.types import DataError


def check_regular(path: Path) -> Path:
    """Return `path` unchanged. It may be missing. Raises DataError for a named pipe, a device or a socket."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{path}: is not a regular file but a named pipe, a device or a socket. Give a file.")
    return path


def check_folder_of_files(folder: Path) -> None:
    """Raise DataError if an entry of a folder is neither a regular file nor a folder, or if it cannot be listed."""
    if not folder.is_dir():
        return
    try:
        # Sorted, so that the error is the same on every machine.
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"{folder}: the folder cannot be listed ({error.strerror}). Give the run's user read permission."
        ) from None
    for path in paths:
        check_regular(path)
