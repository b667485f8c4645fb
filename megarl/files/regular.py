"""Refuses what is not a regular file before it is opened: opening a named pipe waits for its writer without end."""

from __future__ import annotations

from pathlib import Path

from megarl.types import DataError


def check_regular(path: Path) -> Path:
    """Return `path`, which may be missing. Raises DataError where a named pipe, a device or a socket is there."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{path}: is not a regular file but a named pipe, a device or a socket. Give a file.")
    return path


def check_folder_of_files(folder: Path) -> None:
    """Raise DataError where an entry of a folder is neither a regular file nor a folder."""
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            check_regular(path)
