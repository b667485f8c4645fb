"""Page-locking of host memory, so that a GPU can copy to and from it in the background. A machine's ranks take turns.

Kernel and driver hold machine-wide locks meanwhile. Ranks that lock pages at the same time all finish last.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.files.machine_lock import MachineLock
from megarl.platform import device
from megarl.types import MegarlError

_LONGEST_WAIT_SECONDS = 30.0
"""Seconds to wait for a turn; then continue without one. A process suspended during its turn must not stop the
others.
"""
_POLL_SECONDS = 0.002


def page_lock(memory: Tensor) -> None:
    """Page-lock host memory [bytes] for this rank's GPU. On a CPU nothing is locked.

    The memory must stay mapped until `unlock`. Raises MegarlError if the system refuses.
    """
    if device.current().type == "cpu":
        return
    runtime: Any = torch.cuda.cudart()
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status) != 0:
        raise MegarlError(lock_error_text(memory.nbytes, runtime.cudaGetErrorString(status)))


def unlock(memory: Tensor) -> None:
    if device.current().type != "cpu":
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(memory.data_ptr())


def lock_error_text(num_bytes: int, reason: str) -> str:
    """Return the message for a refused lock: its size, this process's limit, and the remedies."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    return (
        f"page-locking {num_bytes >> 20} MiB of host memory failed: {reason}. The limit of locked memory is {allowed} "
        "(ulimit -l): allow unlimited (in a container: --ulimit memlock=-1), free host memory, or remove states from "
        "trainer.offload"
    )


@contextmanager
def turn(folder: Path | None = None) -> Iterator[None]:
    """Let no other process of this user on this machine lock pages inside this context.

    `folder` holds the lock's file; None: the system's temporary folder. If the file cannot be opened, locking is only
    slower.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"megarl-page-lock-{os.getuid()}"
    try:
        lock = MachineLock(path)
    except OSError:
        yield
        return
    with lock:
        _acquire(lock)
        yield


def _acquire(lock: MachineLock) -> None:
    end = time.monotonic() + _LONGEST_WAIT_SECONDS
    while not lock.acquire() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
