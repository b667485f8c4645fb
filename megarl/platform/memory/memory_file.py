"""Host memory in nameless files. Other processes of this user on this machine can open them.

Such files hold copies of the training state, so the copies outlive the rank that made them. The kernel frees a file
when the last process with it open ends, so a kill leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from megarl.platform import device
from megarl.platform.memory.page_lock import page_lock, turn, unlock


class MemoryFile:
    """A file in memory, with its bytes as `tensor` [bytes], uint8."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Map an open file of this size. The object owns the descriptor."""
        self.descriptor, self.num_bytes, self._is_locked = descriptor, num_bytes, False
        # mmap rejects an empty file.
        self._mapped = mmap.mmap(descriptor, num_bytes) if num_bytes else None
        self.tensor: Tensor = (
            torch.empty(0, dtype=torch.uint8)
            if self._mapped is None
            else torch.frombuffer(self._mapped, dtype=torch.uint8)
        )

    @classmethod
    def create(cls, num_bytes: int) -> MemoryFile:
        """Return a new file. With a GPU its pages are locked, for fast copies."""
        descriptor = os.memfd_create("megarl copy")
        os.truncate(descriptor, num_bytes)
        file = cls(descriptor, num_bytes)
        if num_bytes and device.current().type == "cuda":
            with turn():
                page_lock(file.tensor)
            file._is_locked = True
        return file

    @classmethod
    def open(cls, path: str, num_bytes: int) -> MemoryFile:
        """Open a file of another process. Raises OSError if that process has ended."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), num_bytes)

    @property
    def path(self) -> str:
        """Path by which this user's other processes open the file, as long as this process has it open."""
        return str(Path("/proc") / str(os.getpid()) / "fd" / str(self.descriptor))

    def __del__(self) -> None:
        if self._is_locked:
            unlock(self.tensor)
        # The mapping remains until the tensor is freed.
        os.close(self.descriptor)
