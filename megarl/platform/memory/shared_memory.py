"""Check of shared memory. If there is too little, libraries on the ranks wait for each other for ever."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from megarl.types import ConfigError, DiskFullError

SHARED_MEMORY = Path("/dev/shm")
_LEAST_BYTES = 16 << 20
"""Bytes of shared memory that a start needs."""


def check_shared_memory(folder: Path = SHARED_MEMORY) -> None:
    """Write 16 MiB of shared memory. Raises ConfigError if it cannot be written, DiskFullError if it is full."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # Unlike a sparse file this reserves the pages, so it fails if memory is short.
            os.posix_fallocate(file.fileno(), 0, _LEAST_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise DiskFullError(
                f"{folder} has no room for {_LEAST_BYTES >> 20} MiB; the ranks of a machine exchange tensors there. "
                "Remove leftover files, or enlarge it (mount -o remount,size=8G, docker run --shm-size=8g)."
            ) from None
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}); the ranks of a machine exchange tensors there. Mount a "
            "tmpfs on it that your user may write, or have the container do so (docker run --shm-size=8g)."
        ) from None
