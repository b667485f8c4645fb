"""Page-locked host memory of one rank for tensors that leave the device: one arena, locked in the background.

torch's allocator would page-lock each tensor when it first leaves the device. It would round each size up to a power of
two.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from megarl.platform import background
from megarl.platform.memory import page_lock
from megarl.platform.memory.host_memory import available_bytes
from megarl.rounding import divide_up, round_up
from megarl.types import ConfigError

CHUNK_BYTES = 256 << 20
"""Bytes page-locked by one call: about 0.16 s on an H200's host. A rank waits at most this long for another rank's
call.
"""
ALIGNMENT = 64
"""Alignment of copies in bytes: a cache line, at which any dtype can begin."""


@dataclass(slots=True)
class _Chunk:
    """Part of an arena that one call page-locks: `memory` [bytes]."""

    memory: Tensor
    is_locked: bool = False


@dataclass(slots=True)
class _Mapping:
    """Contiguous memory [bytes] from the system, cut into chunks. Copies take the first `num_used` bytes."""

    memory: Tensor
    chunks: Sequence[_Chunk]
    num_used: int = 0

    @property
    def free(self) -> int:
        return self.memory.nbytes - self.num_used


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Part of an arena for one tensor or storage: `memory` [bytes], in `chunks`."""

    memory: Tensor
    chunks: Sequence[_Chunk] = field(repr=False)


class HostArena:
    """Page-locked host memory of one rank. On a CPU it is ordinary memory that counts the same calls and bytes.

    A thread locks it chunk by chunk; the machine's ranks take turns. A copy waits for its own chunks only.
    """

    def __init__(self, num_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Reserve `num_bytes` of memory, the sum of `aligned_bytes` over all copies, and start to lock it.

        Raises ConfigError if the machine has less memory.
        """
        self._chunk_bytes = chunk_bytes
        self._mappings: list[_Mapping] = []
        self._lock = Lock()
        self._is_closed = False
        self.num_calls = 0
        """Calls that page-locked memory."""
        self.num_locked_bytes = 0
        self._background: Future[None] | None = None
        if num_bytes:
            chunks = self._extend(num_bytes).chunks
            self._background = background.begin(lambda: self._lock_all(chunks))

    def take_copies(self, sizes: Sequence[int]) -> list[HostCopy]:
        """Return memory for copies of these sizes in bytes; `close` releases it. If the arena is too small, it grows
        once.
        """
        copies: list[HostCopy] = []
        for index, size in enumerate(sizes):
            if not self._mappings or self._mappings[-1].free < aligned_bytes(size):
                self._extend(sum(map(aligned_bytes, sizes[index:])))
            copies.append(self._take_copy(size))
        return copies

    def wait_for(self, copy: HostCopy) -> None:
        """Wait until all of a copy's memory is page-locked. Raises MegarlError if the system refuses."""
        for chunk in copy.chunks:
            self._lock_chunk(chunk)

    def close(self) -> None:
        """Unlock all memory, once all copies from and to the GPU are complete.

        The locking thread stops after its current chunk.
        """
        self._is_closed = True
        if self._background is not None:
            # The thread's error was raised by `wait_for`, or nobody needed that memory.
            with suppress(BaseException):
                background.finish(self._background)
        for mapping in self._mappings:
            for chunk in mapping.chunks:
                if chunk.is_locked:
                    page_lock.unlock(chunk.memory)
                    chunk.is_locked = False
        self._mappings = []

    def _extend(self, num_bytes: int) -> _Mapping:
        """Add at least `num_bytes` bytes of host memory, in chunks that are page-locked later.

        Raises ConfigError if too little is left.
        """
        if (available_memory := available_bytes()) < num_bytes:
            raise ConfigError(
                f"trainer.offload: this rank needs {num_bytes / 2**30:.1f} GiB of host memory for offloaded states and "
                f"models that only score, but the machine has {available_memory / 2**30:.1f} GiB left; remove states "
                "from trainer.offload, or start fewer ranks on the machine"
            )
        mapped_bytes = max(mmap.PAGESIZE, round_up(num_bytes, multiple=mmap.PAGESIZE))
        mapping = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages make locking faster. Some kernels have none.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        # Without this advice, a fork would copy all locked pages, because the GPU may write to them.
        mapping.madvise(mmap.MADV_DONTFORK)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self._mappings.append(_Mapping(memory, [_Chunk(part) for part in memory.split(self._chunk_bytes)]))
        return self._mappings[-1]

    def _take_copy(self, num_bytes: int) -> HostCopy:
        mapping = self._mappings[-1]
        start, stop = mapping.num_used, mapping.num_used + num_bytes
        mapping.num_used += aligned_bytes(num_bytes)
        first_chunk, end_chunk = start // self._chunk_bytes, divide_up(stop, by=self._chunk_bytes)
        return HostCopy(mapping.memory[start:stop], mapping.chunks[first_chunk:end_chunk])

    def _lock_all(self, chunks: Sequence[_Chunk]) -> None:
        for chunk in chunks:
            self._lock_chunk(chunk)

    def _lock_chunk(self, chunk: _Chunk) -> None:
        # The background thread and a waiting main thread may both try: the first locks the chunk.
        with self._lock:
            if chunk.is_locked or self._is_closed:
                return
            with page_lock.turn():
                page_lock.page_lock(chunk.memory)
            chunk.is_locked = True
            self.num_calls += 1
            self.num_locked_bytes += chunk.memory.nbytes


def aligned_bytes(num_bytes: int) -> int:
    """Return the bytes of an arena for a copy of `num_bytes`."""
    return round_up(num_bytes, multiple=ALIGNMENT)
