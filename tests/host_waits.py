"""Counts of the places where the host waits for values of the device."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_READS = {
    torch.Tensor.item: "item",
    torch.Tensor.tolist: "tolist",
    torch.Tensor.cpu: "cpu",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.nonzero: "nonzero",
    torch.nonzero: "nonzero",
    torch.masked_select: "masked_select",
    torch.Tensor.masked_select: "masked_select",
    torch.Tensor.__bool__: "bool",
    torch.Tensor.__int__: "int",
    torch.Tensor.__float__: "float",
    torch.Tensor.__index__: "index",
    torch.equal: "equal",
    torch.Tensor.equal: "equal",
    torch.unique: "unique",
    torch.Tensor.unique: "unique",
}
"""Functions whose result or whose shape depends on a tensor's values, with a short name."""


class HostWaits(TorchFunctionMode):
    """Counts reads of tensors' values, by place: (short name, "file:function").

    On a CPU all tensors are in host memory. So reads of tensors that a GPU would have in host memory count, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _READS.get(func)
        if name is None and func is torch.Tensor.__getitem__ and _has_mask(args[1]):
            name = "mask"
        if name is not None:
            self.count(name)
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> None:
        self.places[name, _place(sys._getframe(2))] += 1


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def _place(frame: FrameType | None) -> str:
    """Return the nearest caller outside of torch and of this file, as "file:function"."""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file != __file__:
            return f"{'/'.join(file.split('/')[-2:])}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"


@contextmanager
def host_waits() -> Iterator[Counter[tuple[str, str]]]:
    """Context that counts the reads of tensors' values and the calls of `torch.cuda.synchronize`, by place."""
    mode = HostWaits()
    whole: Callable[..., Any] = torch.cuda.synchronize

    def synchronize(*args: Any, **kwargs: Any) -> Any:
        mode.count("synchronize")
        return whole(*args, **kwargs)

    torch.cuda.synchronize = synchronize
    try:
        with mode:
            yield mode.places
    finally:
        torch.cuda.synchronize = whole
