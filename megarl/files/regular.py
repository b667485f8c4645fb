"""Checks for regular files before opening. Opening a named pipe would wait forever for its writer."""

from __future__ import annotations

from pathlib import Path

from megarl.types import DataError


def check_regular(path: Path) -> Path:
    """Return `path`, which may be missing. Raises DataError for a named pipe, a device or a socket."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{path}: is not a regular file but a named pipe, a device or a socket. Give a file.")
    return path


def check_folder_of_files(folder: Path) -> None:
    """Raise DataError if an entry of a folder is neither a regular file nor a folder."""
    if folder.is_dir():
        # Sorted, so that the error is the same on every machine.
        for path in sorted(folder.iterdir()):
            check_regular(path)
