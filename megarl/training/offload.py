"""Accelerator memory lent by the trainer to the engine during sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Offloadable:
    """A set of tensors with memory that can be released and reallocated; the tensors and their views stay valid.

    `tensors` lists them at each release: an optimizer has none before its first step. Without `keeps_values`, they come
    back as zeros and need no host memory.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keeps_values: bool = True) -> None:
        self._tensors, self._keeps_values = tensors, keeps_values
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._host: dict[int, Tensor] = {}

    def offload(self) -> None:
        """Move the contents to host memory and free the accelerator's memory."""
        if self._away:
            return
        # Several tensors may share one storage: each storage is moved once.
        storages = {storage._cdata: storage for storage in (t.untyped_storage() for t in self._tensors())}
        for key, storage in storages.items():
            if self._keeps_values:
                # Page-locked memory is slow to allocate, so the host copies are retained for the next release.
                if key not in self._host:
                    on_gpu = storage.device.type == "cuda"
                    self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
                self._host[key].copy_(_bytes(storage), non_blocking=True)
            self._away.append((storage, storage.nbytes()))
        # The copies are asynchronous: their source must not be freed before they end.
        torch.cuda.synchronize()
        for storage, _ in self._away:
            storage.resize_(0)

    def onload(self) -> None:
        """Bring the contents back."""
        for storage, size in self._away:
            storage.resize_(size)
            if self._keeps_values:
                _bytes(storage).copy_(self._host[storage._cdata], non_blocking=True)
            else:
                _bytes(storage).zero_()
        self._away = []


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return a byte view [bytes] of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
