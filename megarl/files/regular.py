"""Checks that a path is a regular file: opening a named pipe would wait for a writer forever."""

from __future__ import annotations

from pathlib import Path

from megarl.types import DataError


def check_regular(path: Path) -> Path:
    """Return `path`, also if it is missing. Raises DataError for a pipe, device or socket."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{path}: is not a regular file but a named pipe, a device or a socket. Give a file.")
    return path


def check_folder_of_files(folder: Path) -> None:
    """Raise DataError if a folder cannot be listed, or has an entry that is neither a regular file nor a folder."""
    if not folder.is_dir():
        return
    try:
        # Sorted: the error is then the same on every machine.
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"{folder}: the folder cannot be listed ({error.strerror}). Give the run's user read permission."
        ) from None
    for path in paths:
        check_regular(path)
