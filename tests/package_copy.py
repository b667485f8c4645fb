"""Copies of megarl's package, for tests that change its code."""

from __future__ import annotations

import shutil
from pathlib import Path

import megarl


def copy_package(folder: Path) -> Path:
    """Copy megarl into a folder, and return the copy. Programs import it if the folder comes first on their path.

    Compiled modules are copied too, because compiling them again takes seconds of each program.
    """
    # While another process writes a compiled module, its name is NAME.pyc.NUMBER; the file may vanish during the copy.
    ignored = shutil.ignore_patterns("*.pyc.*")
    return Path(shutil.copytree(Path(megarl.__file__).parent, folder / "megarl", ignore=ignored))
