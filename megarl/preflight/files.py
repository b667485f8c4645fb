"""Checks of a recipe's files: the run folder, and the files of its data sets."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from megarl.config import Recipe
from megarl.data.kinds.problems import MADE, num_made
from megarl.data.sources.rows import data_files
from megarl.datasets.fields import data_paths, takes_problems
from megarl.preflight.registry import Cost, checks
from megarl.types import DataError


@checks("runs_folder", Cost.FILES)
def check_runs_folder(recipe: Recipe) -> Iterator[str]:
    """Yield an error if the run folder cannot be created in its nearest existing parent.

    A full disk is not an error of the recipe. It ends the run, with a separate exit code.
    """
    runs_path = Path(recipe.runs_folder).absolute()
    nearest = next(folder for folder in (runs_path, *runs_path.parents) if folder.exists())
    try:
        with TemporaryDirectory(dir=nearest, prefix=".megarl-"):
            pass
    except OSError as error:
        # Ignore a full disk, an exceeded quota and I/O errors: editing the recipe does not help.
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return
        yield (
            f"runs_folder = {recipe.runs_folder}: cannot write in {nearest} ({error.strerror}); set runs_folder to a "
            "writable folder"
        )


@checks("data")
def check_made_sources(recipe: Recipe) -> Iterator[str]:
    """Yield an error if an environment makes problems for a field of other records, or has wrong options."""
    for field, path in data_paths(recipe).items():
        try:
            is_made = num_made(path) is not None
        except ValueError as error:
            yield f"{field} = {path}: {error}"
            continue
        if is_made and not takes_problems(recipe, field):
            yield (
                f"{field} = {path}: an environment makes only problems, but this field needs records of another kind; "
                "give a file"
            )


@checks("data", Cost.FILES)
def check_data_set_files(recipe: Recipe) -> Iterator[DataError]:
    """Yield an error for each data file that is missing, unreadable or empty."""
    for field, path in data_paths(recipe).items():
        if path.startswith(MADE):
            continue
        try:
            files = data_files(path)
        except DataError as error:
            fault = str(error).partition(": ")[2]
            is_absent = fault.startswith("no such file")
            yield DataError(f"{path}: {field} {'is not there' if is_absent else 'cannot be read'}: {fault}")
            continue
        # An empty file parses as zero records, and would cause a confusing error later.
        empty_files = (file for file in files if not file.stat().st_size)
        yield from (DataError(f"{file}: {field} is empty; write records into it") for file in empty_files)
