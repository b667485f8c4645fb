"""A model's save on the ranks of a service. A fault of the disk fails only this save.

A rank that raised an error between two collectives would keep the others waiting. So rank 0 reserves the room first,
and the ranks compare their outcomes before the next collective.
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
"""Bytes reserved for a checkpoint's records, besides those that grow with the parameters."""
_RECORD_BYTES_PER_PARAMETER = 4096


SaveOutcome = tuple[dict[str, dict[str, Any]], str | None]
"""A rank's part of a save: its files by name, with size and sha256, and the disk's fault or None."""


def save_model(policy: TrainingEngine, parallel: ParallelConfig, folder: Path) -> SaveOutcome:
    """Write a policy's state to an empty folder, readable with any parallel sizes. A collective.

    After a fault of any rank the folder is incomplete on all.
    """
    num_parameters = len(trained_parameters(policy))
    record_room = _ReservedRoom(folder / "records", _RECORD_BYTES + _RECORD_BYTES_PER_PARAMETER * num_parameters)
    if _any_rank_has(fault := record_room.take()):
        return {}, fault
    # `plan_save` writes already: rank 0's state common to all ranks takes the room of the records.
    record_room.free()
    save = checkpoint.plan_save(folder, {"": policy}, str(parallel))
    tensor_room = _ReservedRoom(folder / "tensors", save.num_bytes)
    if _any_rank_has(fault := record_room.take() or tensor_room.take()):
        return {}, fault
    tensor_room.free()
    try:
        # The driver renames the folder next, so all files must be complete.
        save.write(asynchronous=False)
        fault = None if save.error is None else str(save.error)
    except StorageError as error:
        fault = str(error)
    if _any_rank_has(fault):
        return {}, fault
    # Another program could take the room now, but has little time.
    record_room.free()
    return save.finish() or {}, None


class _ReservedRoom:
    """Room on a disk, held by a file until the real files are written.

    Only rank 0 has the file, for the writes of all ranks.
    """

    def __init__(self, file: Path, num_bytes: int) -> None:
        self._file, self._num_bytes = file, num_bytes

    def take(self) -> str | None:
        """Reserve the room. Returns the fault if the disk lacks it."""
        if dist.get_rank():
            return None
        try:
            # Allocate the bytes: the file system's free bytes do not show a quota.
            with self._file.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._num_bytes)
        except OSError as error:
            return f"{self._file.parent}: no room for {self._num_bytes} bytes ({error.strerror})"
        return None

    def free(self) -> None:
        if not dist.get_rank():
            self._file.unlink(missing_ok=True)


def _any_rank_has(fault: str | None) -> bool:
    """Return whether any rank has a fault. A collective: all ranks stop together."""
    count = torch.tensor(int(fault is not None), device=device.current())
    dist.all_reduce(count)
    return bool(count)
