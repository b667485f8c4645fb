"""The folder in which vLLM keeps what torch.compile made, one for each device of each node."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from megarl.platform import device
from megarl.types import ConfigError

_VARIABLE = "VLLM_CACHE_ROOT"
_NODE_LOCAL = Path("/tmp")
"""Not TMPDIR, which ends with the run, and not a home folder, which all nodes may share."""


def use_own_folder() -> None:
    """Set vLLM's VLLM_CACHE_ROOT to `folder_of_device`, before an engine is built. Without effect on a CPU.

    vLLM 0.30 names a folder by its configuration and the rank in the engine's world (compilation/backends.py), but the
    compiled code contains the index of the device. Two engines of a node, or one that starts again on another device,
    would run code that was compiled for another GPU.

    Raises ConfigError if other users can write the folder, because vLLM executes what it finds there.
    """
    here = device.current()
    if here.type != "cuda":
        return
    if not os.environ.get(_VARIABLE):
        _make_private(_own_root())
    os.environ[_VARIABLE] = str(folder_of_device(here.index or 0))


def folder_of_device(index: int) -> Path:
    """Return the folder of this node's GPU `index`: below VLLM_CACHE_ROOT if it is set, else on the node's own disk."""
    given = os.environ.get(_VARIABLE)
    root = Path(given).expanduser() / socket.gethostname() if given else _own_root() / "vllm"
    return root / f"cuda{index}"


def _own_root() -> Path:
    return _NODE_LOCAL / f"megarl-{os.getuid()}"


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{folder}: compiled kernels are kept there, but other users can write it; remove it, or set {_VARIABLE} "
            "to a folder of your own."
        )
