"""Models and data sets of the Hugging Face Hub in its cache on this machine. Nothing is downloaded here."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

Kind = Literal["model", "dataset"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(text: str) -> bool:
    """Whether a text has the form of a name on the Hub, OWNER/NAME; not whether there is one."""
    return _NAME.fullmatch(text) is not None and ".." not in text


@lru_cache(maxsize=64)
def cached_folder(name: str, kind: Kind) -> Path | None:
    """The folder of a model or data set in the Hub's cache, of its main revision; None where it is not there."""
    if not is_hub_name(name):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type=kind, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def download_command(name: str, kind: Kind) -> str:
    """The command that brings a model or data set into the cache."""
    return f"hf download {name}" + (" --repo-type dataset" if kind == "dataset" else "")
