"""Cache folder for code that vLLM compiles with torch.compile: one for each GPU of each node."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from megarl.platform import device
from megarl.types import ConfigError

_VARIABLE = "VLLM_CACHE_ROOT"
_NODE_LOCAL = Path("/tmp")
"""Parent of the cache folders, on the node's own disk. TMPDIR ends with the run, and nodes may share a home folder."""


def use_folder_of_device() -> None:
    """Set VLLM_CACHE_ROOT to a folder of this GPU.

    Call it before an engine is built. Does nothing on a CPU. vLLM 0.30 names a cache folder by configuration and rank,
    but the compiled code contains the device index. In a shared folder, an engine on another device would run code
    compiled for another GPU. Raises ConfigError if other users can write the folder, because vLLM executes its
    contents.
    """
    rank_device = device.current()
    if rank_device.type != "cuda":
        return
    # Users decide about the permissions of a folder that they chose.
    if not os.environ.get(_VARIABLE):
        _make_private(_default_root())
    os.environ[_VARIABLE] = str(folder_of_device(rank_device.index or 0))


def folder_of_device(index: int) -> Path:
    """Return the folder of this node's GPU `index`: below VLLM_CACHE_ROOT if set, else on the node's own disk."""
    # Nodes may share a folder that the user chose, so add the host name.
    user_folder = os.environ.get(_VARIABLE)
    root = Path(user_folder).expanduser() / socket.gethostname() if user_folder else _default_root() / "vllm"
    return root / f"cuda{index}"


def _default_root() -> Path:
    return _NODE_LOCAL / f"megarl-{os.getuid()}"


def _make_private(folder: Path) -> None:
    """Create the folder, and refuse one that others can write: kernels in it are run."""
    folder.mkdir(mode=0o700, exist_ok=True)
    # lstat: another user may have put a link here, and `exist_ok` accepts links.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{folder}: vLLM keeps compiled kernels here, but other users can write it; remove it, or set {_VARIABLE} "
            "to a folder of your own."
        )
