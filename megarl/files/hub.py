"""Models and data sets of the Hugging Face Hub in this machine's cache. Nothing is downloaded."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

Kind = Literal["model", "dataset"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form OWNER/NAME of a repository on the Hub. The repository need not exist."""
    return _NAME.fullmatch(text) is not None and ".." not in text


@lru_cache(maxsize=64)
def cached_folder(name: str, kind: Kind) -> Path | None:
    """Return the folder of a model or data set in the Hub's cache (main revision), or None if it is not cached."""
    if not is_hub_name(name):
        return None
    # Imported here, because huggingface_hub loads slowly and most runs have local folders.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type=kind, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def download_command(name: str, kind: Kind) -> str:
    """Return the shell command that downloads a model or data set into the Hub's cache."""
    return f"hf download {name}" + (" --repo-type dataset" if kind == "dataset" else "")
