"""Download of a recipe's models and data sets from the Hugging Face Hub, if this machine lacks them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megarl.config import Recipe
from megarl.data.kinds.problems import num_made
from megarl.data.sources.rows import missing_data_set
from megarl.datasets.fields import data_paths
from megarl.files.hub import Kind, Patterns, cached_folder, download, download_command, names_repository
from megarl.files.model_folder import UNREAD, check_model_folder, download_commands
from megarl.types import DataError


def download_missing(recipe: Recipe, notify: Callable[[str], object], *, with_models: bool = True) -> bool:
    """Download a recipe's models and data sets from the Hub, except those in this machine's cache.

    Local paths and generated problems need no download. Without `with_models`, only data sets are downloaded. `notify`
    gets a line before and after each download. Returns whether anything was downloaded. Raises DataError with the
    recipe field, the reason, and the command to run on a machine with a network.
    """
    paths = recipe.model_paths if with_models else {}
    was_downloaded = [download_model(path, field, notify) for field, path in paths.items()]
    for field, source in data_paths(recipe).items():
        missing_files = None if num_made(source) is not None else missing_data_set(source)
        if missing_files is not None:
            _download(
                missing_files.name,
                "dataset",
                field,
                download_command(missing_files.name, "dataset"),
                notify,
                missing_files.only,
            )
        was_downloaded.append(missing_files is not None)
    return any(was_downloaded)


def download_model(path: str, field: str, notify: Callable[[str], object]) -> bool:
    """Download a model if `path` is its Hub name and the cache lacks some of its files. Returns whether it did.

    `field` is the recipe field for messages. `notify` gets a line before and after the download.
    """
    if not names_repository(path):
        return False
    folder = cached_folder(path, "model", without=UNREAD)
    # `hf download NAME config.json` makes a cache without weights.
    if folder is not None and not check_model_folder(folder):
        return False
    _download(path, "model", field, download_commands(Path(path)), notify, without=UNREAD)
    return True


def _download(
    name: str,
    kind: Kind,
    field: str,
    commands: str,
    notify: Callable[[str], object],
    only: Patterns | None = None,
    without: Patterns | None = None,
) -> None:
    """Download a model or data set from the Hub. Raises DataError with the `commands` to run elsewhere.

    `only` and `without`: patterns of file names.
    """
    notify(f"downloading {name} ({field}) from the Hub")
    start_time = time.monotonic()
    try:
        folder = download(name, kind, only=only, without=without)
    except DataError as error:
        raise DataError(
            f"{field} = {name}: not a local path, not in the Hub's cache, and not downloaded: {error}. To download it "
            f"where there is a network: {commands}"
        ) from None
    notify(f"downloaded {name} in {time.monotonic() - start_time:.0f} s: {folder}")
