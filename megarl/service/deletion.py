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
    def note(function: Any, path: str, fault: Any) -> None:
        # Another process may delete the same folder.
        if not isinstance(fault[1], FileNotFoundError):
            report(_fault_text(path, fault[1]))

    shutil.rmtree(folder, onerror=note)


def _fault_text(path: Path | str, error: OSError) -> str:
    return f"{path}: cannot be deleted ({error.strerror}), and takes room on its disk; delete it yourself"
