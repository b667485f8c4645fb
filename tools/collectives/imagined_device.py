"""A device without memory: tensors have shapes and types, and small ones the numbers that steer the host.

Tensors are on torch's meta device. Integers, truth values and short vectors are computed for real, in host memory, as
far as they follow from known numbers: rows of tokens, counts of tokens for each expert, flags. All other numbers are
unknown, and are read as zero. A training step then takes its ordinary course: a loss of 0 is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.platform import device

META = torch.device("meta")
_MOST_NUMBERS = 1 << 21
"""Largest number of floating-point numbers in a tensor that are computed."""
_MOST_INTEGERS = 1 << 24
"""Largest number of integers or truth values in a tensor that are computed."""
_MOST_BYTES = 1 << 27
"""Largest memory of a tensor, with all that it is a view of, for which values are kept."""
_VALUES = "imagined_values"
"""Attribute of a storage with its real values in host memory."""

aten = torch.ops.aten
_CONSTANTS = {
    aten.zeros.default, aten.ones.default, aten.full.default, aten.arange.default, aten.arange.start,
    aten.arange.start_step, aten.scalar_tensor.default, aten.eye.default, aten.eye.m,
}  # fmt: skip
"""Functions whose results follow from their arguments alone."""
_LIKE_CONSTANTS = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default,
}  # fmt: skip
"""Functions whose results follow from the shape of their first argument."""
_ZEROS = {aten.zeros_like.default, aten.new_zeros.default}


class _Kind(NamedTuple):
    """Effects of a torch function on its arguments: it writes some, or returns views of some."""

    is_mutable: bool
    is_view: bool
    written: tuple[int | str, ...]


@cache
def _kind(func: Any) -> _Kind:
    """Return whether an operator writes its arguments or returns a view, and which arguments it writes."""
    schema = func._schema
    written: list[int | str] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else place)
    returned = any(result.alias_info is not None for result in schema.returns)
    return _Kind(bool(written), returned and not written, tuple(written))


def choose_imagined_device() -> None:
    """Let all code of megarl in this process compute on the imagined device. Call it before the trainer is imported."""
    device.current = lambda: META


def values_of(tensor: Tensor) -> Tensor | None:
    """Return the known values of an imagined tensor [*shape], a view in host memory; None if they are unknown."""
    stored = getattr(tensor.untyped_storage(), _VALUES, None)
    if stored is None:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.numel() == 0 else None
    flat = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(stored)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_small(tensor: Tensor) -> bool:
    limit = _MOST_NUMBERS if tensor.dtype.is_floating_point else _MOST_INTEGERS
    return tensor.numel() <= limit and tensor.untyped_storage().nbytes() <= _MOST_BYTES


def _keep(tensor: Tensor, values: Tensor) -> None:
    """Store the values [*shape] of an imagined tensor, together with the memory around it."""
    storage = tensor.untyped_storage()
    stored = getattr(storage, _VALUES, None)
    if stored is None:
        is_whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        stored = _host_memory(storage.nbytes(), is_zero=not is_whole)
        setattr(storage, _VALUES, stored)
    flat = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(stored)
    flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(values)


def _keep_zeros(tensor: Tensor) -> None:
    """Store zeros as the values of a new imagined tensor [*shape]."""
    storage = tensor.untyped_storage()
    setattr(storage, _VALUES, _host_memory(storage.nbytes(), is_zero=True))


def _host_memory(num_bytes: int, *, is_zero: bool) -> torch.UntypedStorage:
    # numpy takes zeros from calloc, which leaves large blocks untouched. torch.zeros would write each byte: an
    # optimizer's states then took half of a trace's time.
    make = np.zeros if is_zero else np.empty
    return torch.from_numpy(make(num_bytes, np.uint8)).untyped_storage()


def _forget(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    if getattr(storage, _VALUES, None) is not None:
        setattr(storage, _VALUES, None)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(part, change) for part in value)
    if isinstance(value, dict):
        return {name: _map_tensors(part, change) for name, part in value.items()}
    return value


class _UnknownError(Exception):
    """Raised where a value is needed and not known."""


def _require_values(tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return tensor
    values = values_of(tensor)
    if values is None:
        raise _UnknownError
    return values


def _to_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


class ImaginedDevice(TorchDispatchMode):
    """Context in which tensors on the meta device have values as far as the module's docstring says."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[Any, Callable[[Any, Any], Any] | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here. torch 2.13 would otherwise wrap each call, for 10 % of a trace's time.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        imagined = [tensor for tensor in tensors if tensor.is_meta]
        special = _SPECIAL.get(func)
        if special is not None and (imagined or func in _FROM_HOST):
            return special(func, args, kwargs)
        if not imagined:
            result = func(*args, **kwargs)
            if func in _CONSTANTS and result.is_meta and _is_small(result):
                _keep(result, func(*args, **{name: _to_host(value) for name, value in kwargs.items()}))
            return result
        if func in _LIKE_CONSTANTS:
            result = self._run(func, args, kwargs)
            if not _is_small(result):
                return result
            if func in _ZEROS:
                _keep_zeros(result)
            else:
                host = {name: _to_host(value) for name, value in kwargs.items()}
                stand_in = torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu")
                _keep(result, func(stand_in, *args[1:], **host))
            return result
        kind = _kind(func)
        if kind.is_view:
            return func(*args, **kwargs)
        result = self._run(func, args, kwargs)
        if kind.is_mutable:
            _write(func, kind, args, kwargs)
            return result
        results = [result for result in _tensors((result,)) if result.is_meta]
        if not results or not all(map(_is_small, results)) or not all(map(_is_small, imagined)):
            return result
        try:
            computed = func(
                *_map_tensors(args, _require_values),
                **{n: _to_host(v) for n, v in _map_tensors(kwargs, _require_values).items()},
            )
        except _UnknownError:
            return result
        for result, values in zip(results, _tensors((computed,)), strict=True):
            _keep(result, values)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function on imagined tensors, without values.

        torch computes shapes on the meta device in Python, in 0.1 to 1 ms. Layers repeat them, so they are remembered.
        """
        key = (func, _description(args), _description(kwargs.items()))
        try:
            repeat = self._results.get(key)
        except TypeError:
            return func(*args, **kwargs)
        if repeat is not None:
            return repeat(args, kwargs)
        result = func(*args, **kwargs)
        self._results[key] = _repeater(_kind(func), result)
        return result


def _description(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return arguments in a form by which results are remembered: tensors [*shape] by shape, strides and type."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            parts.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif isinstance(value, (list, tuple)):
            parts.append(_description(value))
        else:
            # 1, 1.0 and True are equal, but their results differ in type.
            parts.append((type(value), value))
    return tuple(parts)


def _repeater(kind: _Kind, result: Any) -> Callable[[Any, Any], Any] | None:
    """Return a function of a call's arguments that returns what `result` was; None if it cannot be repeated."""
    if kind.is_mutable:
        if len(kind.written) == 1 and isinstance(result, Tensor):
            [place] = kind.written
            return lambda args, kwargs: args[place] if isinstance(place, int) else kwargs[place]
        return None
    if isinstance(result, Tensor) and result.is_meta:
        shape, stride, dtype = result.shape, result.stride(), result.dtype
        return lambda args, kwargs: torch.empty_strided(shape, stride, dtype=dtype, device=META)
    if isinstance(result, tuple) and all(isinstance(part, Tensor) and part.is_meta for part in result):
        parts = [(part.shape, part.stride(), part.dtype) for part in result]
        return lambda args, kwargs: tuple(
            torch.empty_strided(shape, stride, dtype=dtype, device=META) for shape, stride, dtype in parts
        )
    return None


def _write(func: Any, kind: _Kind, args: Any, kwargs: Any) -> None:
    """Repeat a function that writes its arguments on their values, or forget these if its inputs are unknown."""
    written = [args[place] if isinstance(place, int) else kwargs.get(place) for place in kind.written]
    targets = [tensor for tensor in _tensors(written) if tensor.is_meta]
    if not all(map(_is_small, targets)):
        for target in targets:
            _forget(target)
        return
    target_ids = {id(target) for target in targets}
    overwrites = func in _OVERWRITING
    try:
        for target in targets:
            if values_of(target) is None and not overwrites:
                raise _UnknownError
        inputs = [t for t in [*_tensors(args), *_tensors(kwargs.values())] if id(t) not in target_ids]
        if not all(not tensor.is_meta or _is_small(tensor) for tensor in inputs):
            raise _UnknownError
        for tensor in inputs:
            _require_values(tensor)
        for target in targets:
            if values_of(target) is None:
                _keep(target, torch.zeros(target.shape, dtype=target.dtype, device="cpu"))
        func(*_map_tensors(args, _require_values), **_map_tensors(kwargs, _require_values))
    except _UnknownError:
        for target in targets:
            _forget(target)


_OVERWRITING = {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}
"""Functions that do not read what they write."""


def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy a tensor between host and imagined device, or within one of them."""
    source: Tensor = args[0]
    device = kwargs.get("device")
    target = source.device if device is None else torch.device(device)
    if source.is_meta and target.type == "cpu":
        values = values_of(source)
        if values is None:
            values = torch.zeros(source.shape, dtype=source.dtype, device="cpu")
        return func(values, **{**kwargs, "device": target})
    result = func(*args, **kwargs)
    if target.type == "meta" and _is_small(result):
        values = values_of(source) if source.is_meta else source
        if values is not None:
            _keep(result, func(values, **{**kwargs, "device": torch.device("cpu")}))
    return result


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[0], args[1]
    if not target.is_meta:
        values = values_of(source)
        return target.copy_(torch.zeros(source.shape, dtype=source.dtype) if values is None else values)
    func(*args, **kwargs)
    values = values_of(source) if source.is_meta else source
    if values is None or not _is_small(target):
        _forget(target)
    else:
        _keep(target, values.expand(target.shape))
    return target


def _number(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a number that the host reads: zero if it is unknown."""
    values = values_of(args[0])
    return values.item() if values is not None else torch.zeros((), dtype=args[0].dtype, device="cpu").item()


def _empty_like(tensor: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device=META)


def _select_masked(func: Any, args: Any, kwargs: Any) -> Any:
    """Select the elements [selected] of a tensor by a known mask."""
    source, mask = args
    mask_values = _known_or_refuse(mask, func)
    result = _empty_like(source, int(mask_values.expand(torch.broadcast_shapes(source.shape, mask.shape)).sum()))
    values = values_of(source)
    if values is not None and _is_small(result):
        _keep(result, func(values, mask_values))
    return result


def _known_or_refuse(tensor: Tensor, func: Any) -> Tensor:
    """Return known values [*shape]. Raises NotImplementedError where sizes of results depend on unknown ones."""
    values = values_of(tensor) if tensor.is_meta else tensor
    if values is None:
        raise NotImplementedError(f"{func}: the size of its result depends on numbers that are unknown on this device")
    return values


def _nonzero(func: Any, args: Any, kwargs: Any) -> Any:
    places = func(_known_or_refuse(args[0], func))
    return places.to(META)


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    """Index a tensor. Masks become the places of their true elements."""
    source, indices = args[0], args[1]
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        places: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                places += [part.to(META) for part in _known_or_refuse(index, func).nonzero(as_tuple=True)]
            else:
                places.append(index)
        indices = places
    rest = args[2:]
    result = func(source, indices, *rest, **kwargs)
    try:
        if _is_small(result) and _is_small(source):
            _keep(result, func(_require_values(source), [None if i is None else _require_values(i) for i in indices]))
    except _UnknownError:
        pass
    return result


def _top(func: Any, args: Any, kwargs: Any) -> Any:
    """Choose the largest elements. Of unknown numbers, choose all places in turn, so that all are chosen equally."""
    values, places = func(*args, **kwargs)
    known_values = values_of(args[0])
    if known_values is not None:
        largest = func(known_values, *args[1:], **kwargs)
        _keep(values, largest[0])
        _keep(places, largest[1])
    elif _is_small(places):
        count, length = places.shape[-1], args[0].shape[-1]
        _keep(places, (torch.arange(places.numel()) % length).view(*places.shape[:-1], count))
    return values, places


def _repeat_interleave(func: Any, args: Any, kwargs: Any) -> Any:
    return func(_known_or_refuse(args[0], func), **kwargs).to(META)


_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten._local_scalar_dense.default: _number,
    aten.masked_select.default: _select_masked,
    aten.nonzero.default: _nonzero,
    aten.index.Tensor: _index,
    aten.topk.default: _top,
    aten.repeat_interleave.Tensor: _repeat_interleave,
}
_FROM_HOST = {aten._to_copy.default}
"""Functions that may bring a host tensor to the imagined device."""


def _read_numbers(data: Any) -> Any:
    """Return the data of a new tensor with numbers in place of imagined tensors [], which torch would read itself."""
    if isinstance(data, Tensor):
        return data.cpu()
    if isinstance(data, (list, tuple)) and any(isinstance(part, (Tensor, list, tuple)) for part in data):
        return [part.item() if isinstance(part, Tensor) else _read_numbers(part) for part in data]
    return data


@contextmanager
def imagined_device() -> Iterator[None]:
    """Context of an `ImaginedDevice`, in which `torch.tensor` also keeps its values there."""
    made_on = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.pop("device", None)
        # torch 2.13 drops the data of a tensor that is made on the meta device.
        made_tensor = made_on(_read_numbers(data), *args, **kwargs, device="cpu")
        if device is None:
            return made_tensor
        return made_tensor.to(META if str(device).startswith("cuda") else device)

    torch.tensor = tensor
    try:
        with ImaginedDevice():
            yield
    finally:
        torch.tensor = made_on
