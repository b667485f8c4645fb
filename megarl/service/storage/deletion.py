"""Deletion of files that are no longer needed. Faults are reported, not raised."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = Callable[[str], object]
"""Function called with a sentence about each file that cannot be deleted."""


def delete_file(file: Path, report: Report) -> bool:
    """Delete a file. Returns whether it is gone."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        report(_fault_text(file, error))
        return False
    return True


def delete_tree(folder: Path, report: Report) -> None:
    """Delete a folder. Files that cannot be deleted are reported, and stay."""

    def report_fault(_function: Any, path: str, exc_info: Any) -> None:
        _, error, _ = exc_info
        # Another process may delete the same folder.
        if not isinstance(error, FileNotFoundError):
            report(_fault_text(path, error))

    shutil.rmtree(folder, onerror=report_fault)


def _fault_text(path: Path | str, error: OSError) -> str:
    return f"{path}: cannot be deleted ({error.strerror}), and takes room on its disk; delete it yourself"
