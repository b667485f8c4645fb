"""Models and data sets of the Hugging Face Hub: look-up in this machine's cache, download, upload.

huggingface_hub determines the Hub's address and the token: HF_ENDPOINT, HF_TOKEN or the file that `hf auth login`
writes. A token is never an argument, so that recipes and logs contain none.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from megarl.files.atomic import disk_full
from megarl.types import ConfigError, DataError, StorageError

Kind = Literal["model", "dataset"]
Patterns = tuple[str, ...]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json")
"""Endings of weight files. An upload removes such files from a repository's top if the folder lacks them."""


_USUAL_FOLDERS = frozenset({"runs", "data", "datasets", "models", "checkpoints", "outputs"})


class Pushed(NamedTuple):
    """An upload to the Hub: the repository's name, and the commit's id."""

    name: str
    commit: str


def is_hub_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and ".." not in text


def names_repository(path: str) -> bool:
    """Return whether a path is OWNER/NAME on the Hub, and no folder OWNER exists here.

    Usual folder names do not count: a command in a wrong folder must not download from a stranger.
    """
    owner = Path(path).parent
    return is_hub_name(path) and owner.name not in _USUAL_FOLDERS and not owner.exists()


@lru_cache(maxsize=64)
def cached_folder(name: str, kind: Kind, only: Patterns | None = None, without: Patterns | None = None) -> Path | None:
    """Return the folder of a model or data set in the Hub's cache (main revision); None: it is not complete there.

    `only` and `without` are patterns of needed and of unneeded file names.
    """
    if not is_hub_name(name):
        return None
    # Imported here: huggingface_hub loads slowly, and most runs have local folders.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name,
            repo_type=kind,
            local_files_only=True,
            allow_patterns=None if only is None else list(only),
            ignore_patterns=None if without is None else list(without),
        )
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return Path(folder)


def download(name: str, kind: Kind, *, only: Patterns | None = None, without: Patterns | None = None) -> Path:
    """Download a model or data set into the Hub's cache, and return its folder. A terminal shows the progress.

    `only` and `without` are as in `cached_folder`. Raises DataError, with only the reason, if there is no network, no
    such repository, or no permission.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = snapshot_download(
            name,
            repo_type=kind,
            allow_patterns=None if only is None else list(only),
            ignore_patterns=None if without is None else list(without),
        )
    except RepositoryNotFoundError:
        noun = "model" if kind == "model" else "data set"
        raise DataError(
            f"the Hub has no {noun} of this name, or it is private or gated: then set HF_TOKEN or run hf auth login"
        ) from None
    except LocalEntryNotFoundError:
        raise DataError("the Hub cannot be reached from here") from None
    except Exception as error:  # Errors of the network come in many classes, and some are those of the HTTP library.
        if disk_full(error) is not None:
            raise
        raise DataError(_first_line(error)) from None
    # `cached_folder` may remember that the model was not in the cache.
    cached_folder.cache_clear()
    return Path(folder)


def download_command(name: str, kind: Kind) -> str:
    return f"hf download {name}" + (" --repo-type dataset" if kind == "dataset" else "")


def check_push(option: str, hub_name: str) -> None:
    """Raise ConfigError if the name for an upload is malformed or there is no token. Needs no network.

    `option` is the command's option in errors.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(hub_name)
    except HFValidationError:
        is_valid = False
    else:
        is_valid = is_hub_name(hub_name)
    if not is_valid:
        raise ConfigError(f"{option} {hub_name}: not a name on the Hub; write OWNER/NAME, such as my-team/qwen3-math")
    if not get_token():
        raise ConfigError(f"{option} {hub_name}: there is no token for the Hub; set HF_TOKEN, or run hf auth login")


def push(folder: Path, name: str, message: str, *, is_private: bool, without: Patterns = ()) -> Pushed:
    """Upload a model folder to the repository `name` on the Hub in one commit. A missing repository is created.

    Weights at the repository's top that the folder lacks are removed. Hidden files and those in `without` are not sent.
    `is_private` makes a new repository private. Raises ConfigError if `is_private` is set but the repository is public,
    and StorageError if the Hub refuses the upload or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    files = _visible_files(folder)
    additions = [CommitOperationAdd(file, folder / file) for file in files if file not in without]
    api = HfApi()
    try:
        try:
            is_public = not api.model_info(name).private
        except RepositoryNotFoundError:
            is_public = False
        if is_private and is_public:
            raise ConfigError(
                f"--private: {name} exists on the Hub and is public; leave the option out, or choose another name"
            )
        api.create_repo(name, private=is_private or None, exist_ok=True)
        # transformers would read an older model.safetensors before the index of newer files. It does not read weights
        # in subfolders, which may be other variants.
        top_files = [file for file in api.list_repo_files(name) if "/" not in file]
        stale_files = [file for file in top_files if file.endswith(_WEIGHT_ENDINGS) and file not in files]
        removals = [CommitOperationDelete(file) for file in stale_files]
        # huggingface_hub 2.4's upload_folder makes several commits of a large folder; create_commit makes one.
        commit = api.create_commit(name, [*removals, *additions], commit_message=message)
    except ConfigError:
        raise
    except Exception as error:  # Errors of the network come in many classes, and some are those of the HTTP library.
        raise StorageError(
            f"{folder}: the upload to {name} failed ({_first_line(error)}). Check network, token and permissions, then "
            "repeat the command; weights that arrived are not sent again"
        ) from None
    return Pushed(name, commit.oid)


def _visible_files(folder: Path) -> list[str]:
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)]


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
