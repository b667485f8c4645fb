"""Counts of the places where the host waits for values of the device."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.cuda import streams
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


_FACTORIES = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that copy values of Python or numpy to the device that they are given."""
_SYNCHRONISING = (
    (torch.cuda, "synchronize", "synchronize"),
    (streams.Stream, "synchronize", "stream"),
    (streams.Event, "synchronize", "event"),
)
"""Functions and methods without a tensor that wait for the device: their owner and name, and a short name."""


class HostWaitError(AssertionError):
    """Raised at a wait of the host, in a context that permits none."""


class HostWaits(TorchFunctionMode):
    """Counts reads of tensors' values, by place: (short name, "file:function"). `is_refusing`: raises at the first one.

    On a CPU all tensors are in host memory. So reads of tensors that a GPU would have in host memory count, too. Of
    copies only those to the device "cpu", written so, count there: a rank's own device looks the same otherwise. On a
    GPU all copies count that the host waits for.
    """

    def __init__(self, is_refusing: bool = False) -> None:
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()
        self._is_refusing = is_refusing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _READS.get(func)
        if name is None and func is torch.Tensor.__getitem__ and _has_mask(args[1]):
            name = "mask"
        if name is None:
            name = _copy_of(func, args, kwargs or {})
        if name is not None:
            self.count(name)
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> None:
        self.places[name, place := _place(sys._getframe(2))] += 1
        if self._is_refusing:
            raise HostWaitError(f"the host waits for the device ({name}) in {place}")


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def _copy_of(func: Any, args: Any, kwargs: Any) -> str | None:
    """Return the short name of a copy that the host waits for, None for another call."""
    if not torch.cuda.is_available():
        named = [*args[1:2], kwargs.get("device")]
        is_to_host = func is torch.Tensor.to and any(isinstance(device, str) and device == "cpu" for device in named)
        return "to" if is_to_host and not kwargs.get("non_blocking", args[3:4] == (True,)) else None
    if func is torch.Tensor.to:
        other = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(other, Tensor):
            device, is_asynchronous = other.device, bool(kwargs.get("non_blocking", args[3:4] == (True,)))
        else:
            device, _, is_asynchronous, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
        return None if device is None else _crossing("to", args[0], device, is_asynchronous)
    if func is torch.Tensor.cuda:
        is_asynchronous = bool(kwargs.get("non_blocking", args[2:3] == (True,)))
        return _crossing("cuda", args[0], torch.device("cuda"), is_asynchronous)
    if func is torch.Tensor.copy_:
        is_asynchronous = bool(kwargs.get("non_blocking", args[2:3] == (True,)))
        target, source = args[0], kwargs.get("src", args[1] if len(args) > 1 else None)
        if not isinstance(source, Tensor) or target.device.type == source.device.type:
            return None
        host = target if target.is_cpu else source
        return None if is_asynchronous and host.is_pinned() else "copy_"
    if func in _FACTORIES and kwargs.get("device") is not None:
        values = args[0] if args else kwargs.get("data")
        device = torch.device(kwargs["device"])
        if isinstance(values, Tensor):
            return _crossing("tensor", values, device, False)
        return None if device.type == "cpu" else "tensor"
    return None


def _crossing(name: str, source: Tensor, device: torch.device, is_asynchronous: bool) -> str | None:
    """Return the name if the host waits for a copy of a tensor to a device."""
    if source.device.type == device.type:
        return None
    # torch copies to the host into pinned memory if it shall not wait.
    is_pinned = not source.is_cpu or source.is_pinned()
    return None if is_asynchronous and is_pinned else name


def _place(frame: FrameType | None) -> str:
    """Return the nearest caller outside of torch and of this file, as "file:function"."""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file != __file__:
            return f"{'/'.join(file.split('/')[-2:])}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"


@contextmanager
def host_waits(is_refusing: bool = False) -> Iterator[Counter[tuple[str, str]]]:
    """Context that counts the places where the host waits: reads of values, blocking copies, and synchronisation of
    device, streams and events. With `is_refusing` the first one raises HostWaitError.
    """
    mode = HostWaits(is_refusing)

    def counting(name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def synchronize(*args: Any, **kwargs: Any) -> Any:
            mode.count(name)
            return whole(*args, **kwargs)

        return synchronize

    with ExitStack() as stack:
        for owner, attribute, name in _SYNCHRONISING:
            stack.enter_context(patch.object(owner, attribute, counting(name, getattr(owner, attribute))))
        stack.enter_context(mode)
        yield mode.places
