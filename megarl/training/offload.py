"""Accelerator memory that the trainer lends to the engine while it samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Offloadable:
    """A set of tensors whose memory can be given back and taken again; tensors and views of them stay what they are.

    `tensors` lists them whenever memory is given back: an optimizer has none before its first step. Without
    `keeps_values` they come back as zeros and nothing is held in host memory.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keeps_values: bool = True) -> None:
        self._tensors, self._keeps_values = tensors, keeps_values
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._host: dict[int, Tensor] = {}

    def offload(self) -> None:
        """Move the contents to host memory and free the accelerator's."""
        if self._away:
            return
        storages = {storage._cdata: storage for storage in (t.untyped_storage() for t in self._tensors())}
        for key, storage in storages.items():
            if self._keeps_values:
                if key not in self._host:
                    on_gpu = storage.device.type == "cuda"
                    self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
                self._host[key].copy_(_bytes(storage), non_blocking=True)
            self._away.append((storage, storage.nbytes()))
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
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
