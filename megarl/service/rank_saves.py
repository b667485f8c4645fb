"""A model's save on the ranks of a service. A fault of the disk fails this save only.

A save consists of collectives. A rank that left one by an error would keep the others waiting, and end the service. So
rank 0 reserves the room first, and the ranks compare their outcomes before the next collective begins.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.parallel import ParallelConfig
from megarl.platform import device
from megarl.training.state import checkpoint
from megarl.training.state.exchange import trained_parameters
from megarl.training.training_engine import TrainingEngine
from megarl.types import StorageError

# Megatron-Core 0.16 writes about 300 bytes for each of a parameter's four tensors into its records, and a few KiB more.
_RECORD_BYTES = 1 << 18
"""Bytes reserved for the records of a checkpoint without parameters."""
_RECORD_BYTES_PER_PARAMETER = 4096


SaveOutcome = tuple[dict[str, dict[str, Any]], str | None]
"""A rank's part of a save: size and sha256 of its files by name, and the fault of the disk that it met, or None."""


def save_model(policy: TrainingEngine, parallel: ParallelConfig, folder: Path) -> SaveOutcome:
    """Write a policy's state to an empty folder, readable with any parallel sizes. A collective.

    If a rank has a fault, the folder is incomplete on all of them.
    """
    records = _Room(folder / "records", _RECORD_BYTES + _RECORD_BYTES_PER_PARAMETER * len(trained_parameters(policy)))
    if _any_rank_has(fault := records.take()):
        return {}, fault
    # Rank 0 writes the state common to all ranks already here.
    records.free()
    save = checkpoint.plan_save(folder, {"": policy}, str(parallel))
    tensors = _Room(folder / "tensors", save.num_bytes)
    if _any_rank_has(fault := records.take() or tensors.take()):
        return {}, fault
    tensors.free()
    try:
        # The driver renames the folder after this call, so all files must be complete.
        save.write(asynchronous=False)
        fault = None if save.error is None else str(save.error)
    except StorageError as error:
        fault = str(error)
    if _any_rank_has(fault):
        return {}, fault
    # Another program may take the room now, but has little time for it.
    records.free()
    return save.finish() or {}, None


class _Room:
    """Room on a disk that a file holds for later writes. Only rank 0 has the file, for the writes of all ranks."""

    def __init__(self, file: Path, num_bytes: int) -> None:
        self._file, self._num_bytes = file, num_bytes

    def take(self) -> str | None:
        """Reserve the room. Returns the fault if there is none."""
        if dist.get_rank():
            return None
        try:
            # Free bytes of the file system would not show a quota.
            with self._file.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._num_bytes)
        except OSError as error:
            return f"{self._file.parent}: no room for {self._num_bytes} bytes ({error.strerror})"
        return None

    def free(self) -> None:
        if not dist.get_rank():
            self._file.unlink(missing_ok=True)


def _any_rank_has(fault: str | None) -> bool:
    # A collective.
    count = torch.tensor(int(fault is not None), device=device.current())
    dist.all_reduce(count)
    return bool(count)
