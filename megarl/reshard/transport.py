"""Transport: executes one rank's part of a reshard's plan on live tensors, any number of times.

For each bucket, elements for other ranks are packed and sent in one exchange. Meanwhile local elements are copied in
place and the previous bucket is unpacked. CPU ranks on one machine exchange through shared memory. Destinations are
written in place and never rebound, because CUDA graphs hold their addresses. Staging memory is two buckets.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.groups import cross_world
from megarl.platform import device
from megarl.reshard.plan import RankPlan, Transfer, View
from megarl.reshard.staging import PrivateSlots, SharedSlots, is_one_machine

_SMALL_BYTES = 1 << 20
"""Copies with fewer bytes share one kernel launch: a launch takes longer than the copy."""
_BITS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(slots=True)
class _CopyPairs:
    """Pairs (destination view, source view) to copy."""

    tensors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    small: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Pairs copied together by one kernel launch."""
    on_cpu: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add_copy(self, destination: Tensor, source: Tensor) -> None:
        """Add a copy [*shape], as views of equal bits, to the list of copies that run alike."""
        if destination.dtype != source.dtype:
            self.tensors.append((destination, source))
            return
        # A strided copy moves element by element: the wider the elements, the fewer. Views as int64 fail (RuntimeError)
        # if a stride or offset is not a multiple of 8 bytes.
        bits = next(integers for integers in _BITS if integers.itemsize == destination.itemsize)
        destination, source = destination.view(bits), source.view(bits)
        with suppress(RuntimeError):
            destination, source = destination.view(torch.int64), source.view(torch.int64)
        if destination.is_cpu and source.is_cpu:
            self.on_cpu.append((destination, source))
            return
        is_dense = destination.is_contiguous() and source.is_contiguous()
        is_small = destination.is_cuda and source.is_cuda and is_dense and destination.nbytes < _SMALL_BYTES
        (self.small if is_small else self.tensors).append((destination, source))

    def run_copies(self) -> None:
        """Run all copies: by numpy on a CPU, else small dense ones and the others in one launch each."""
        # numpy's copy of long rows is nearly twice as fast: unlike torch's, it does not first read the memory it
        # overwrites. The arrays must not outlive the copy: memory released between copies comes back at other
        # addresses.
        for destination, source in self.on_cpu:
            np.copyto(np.from_dlpack(destination), np.from_dlpack(source))
        for pairs in (self.tensors, self.small):
            if pairs:
                destinations, sources = zip(*pairs, strict=True)
                # torch 2.13 has no public function for many copies in one launch.
                torch._foreach_copy_(destinations, sources)  # pyright: ignore[reportPrivateImportUsage]


@dataclass(slots=True)
class _BoundBucket:
    """One bucket (exchange) of the plan, with all its views of memory."""

    local: _CopyPairs
    pack: _CopyPairs
    unpack: _CopyPairs
    exchange_index: int | None
    """Index of the bucket among a reshard's exchanges; None: no rank sends anything."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Times and sizes of one rank's copies of all weights."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage: `pack`, `wire` (waiting for data), `local`, `unpack`; `total` is the wall time."""
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by kind of copy: `local`, `sent`, `received`."""

    def __add__(self, addend: CopyReport) -> CopyReport:
        seconds, num_bytes = {**self.seconds}, {**self.num_bytes}
        for stage, duration in addend.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + duration
        for kind, size in addend.num_bytes.items():
            num_bytes[kind] = num_bytes.get(kind, 0) + size
        return CopyReport(seconds, num_bytes)


class BucketStage(NamedTuple):
    """Work after the arrival of a bucket. A report lists its seconds under `name`."""

    name: str
    run: Callable[[int], None]


class Transport:
    """One rank's part of a plan, bound to its tensors; `reshard` copies the weights.

    `sources` and `destinations` map storage names to contiguous tensors, which must keep their memory. `dtype` is the
    type of sent elements: it has the plan's item size and is the same on all ranks. Storages of another type are cast.
    Rank i of the plan is rank i of `group`.

    `shared_memory`, equal on all ranks, allows exchanges through shared memory between CPU ranks of one machine. With
    it, the constructor is a collective if ranks exchange anything. Raises ValueError for a missing or too small
    storage.
    """

    def __init__(
        self,
        plan: RankPlan,
        sources: Mapping[str, Tensor],
        destinations: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        shared_memory: bool = True,
        on_arrival: BucketStage | None = None,
    ) -> None:
        """Bind the plan to tensors.

        `on_arrival(number)` is called for each bucket, in order, once this rank has all elements of the bucket in
        place.
        """
        if dtype.itemsize != plan.itemsize:
            raise ValueError(
                f"the reshard's plan was made for {plan.itemsize} bytes per element, but {dtype} has {dtype.itemsize}"
            )
        is_exchanged = any(b.is_exchanged for b in plan.buckets)
        if is_exchanged and dist.get_world_size(group) != plan.num_ranks:
            raise ValueError(
                f"the reshard's plan is for {plan.num_ranks} ranks; its group has {dist.get_world_size(group)}"
            )
        self._on_arrival, self._group = on_arrival, group
        self._device = device_of([*sources.values(), *destinations.values()])
        is_shared = shared_memory and is_exchanged and is_one_machine(self._device.type == "cpu", group)
        self._slots = SharedSlots(plan, dtype, group) if is_shared else PrivateSlots(plan, dtype, self._device, group)
        self._buckets = list(_bind_buckets(plan, sources, destinations, self._slots, dtype))
        numel_by_kind = {
            "local": sum(t.numel for b in plan.buckets for t in b.local),
            "sent": sum(t.numel for b in plan.buckets for t in b.sends),
            "received": sum(t.numel for b in plan.buckets for t in b.receives),
        }
        self._num_bytes = {kind: numel * plan.itemsize for kind, numel in numel_by_kind.items()}
        self.staged_bytes = self._slots.num_bytes

    @torch.no_grad()
    def reshard(self) -> CopyReport:
        """Copy all weights, bucket by bucket. While one bucket travels, the next is packed. A collective."""
        clock = _Clock(self._device)
        in_flight: _BoundBucket | None = None
        for bucket_index, bucket in enumerate(self._buckets):
            if bucket.exchange_index is not None:
                with clock.stage("wire"):
                    self._slots.claim(bucket.exchange_index)
                with clock.stage("pack"):
                    bucket.pack.run_copies()
                with clock.stage("wire"):
                    self._slots.depart(bucket.exchange_index)
            with clock.stage("local"):
                bucket.local.run_copies()
            self._unpack(in_flight, clock)
            in_flight = bucket if bucket.exchange_index is not None else None
            # The stage runs one bucket late: only now are the previous bucket's remote elements unpacked.
            self._run_arrival_stage(bucket_index - 1, clock)
        self._unpack(in_flight, clock)
        self._run_arrival_stage(len(self._buckets) - 1, clock)
        seconds = clock.seconds()
        cross_world.check(self._group)
        return CopyReport(seconds, self._num_bytes)

    def _run_arrival_stage(self, bucket_index: int, clock: _Clock) -> None:
        if self._on_arrival is not None:
            with clock.stage(self._on_arrival.name):
                self._on_arrival.run(bucket_index)

    def _unpack(self, in_flight: _BoundBucket | None, clock: _Clock) -> None:
        if in_flight is not None:
            with clock.stage("wire"):
                self._slots.arrive()
            with clock.stage("unpack"):
                in_flight.unpack.run_copies()
            self._slots.release()


def device_of(storages: Sequence[Tensor]) -> torch.device:
    """Return the device of a rank's exchanges: the accelerator of one of its storages [*shape], else the CPU.

    A rank without storages uses `platform.device.current()`, to join the other ranks' collectives on the right device.
    The backend's name does not determine the device.
    """
    fallback = torch.device("cpu") if storages else device.current()
    return next((storage.device for storage in storages if storage.is_cuda), fallback)


def strided_view(storage: Tensor, view: View, shape: Sequence[int], name: str) -> Tensor:
    """Return a plan's view as a tensor [*shape] in the memory of `storage` [*any].

    Raises ValueError if the view exceeds the storage, or if the storage is not contiguous.
    """
    # `as_strided` does not check the parameter's bounds: it would read the neighbouring memory of a shared storage.
    last_element = view.offset + sum((size - 1) * stride for size, stride in zip(shape, view.strides, strict=True))
    if not storage.is_contiguous() or last_element >= storage.numel():
        raise ValueError(
            f"{name}: the reshard's plan needs element {last_element} of the tensor {view.storage}, but it has "
            f"{storage.numel()} elements"
            f"{'' if storage.is_contiguous() else ' and is not contiguous'}; "
            "the plan was made for another tensor"
        )
    return storage.detach().as_strided(shape, view.strides, storage.storage_offset() + view.offset)


def transfer_view(storage: Tensor, view: View, transfer: Transfer, dtype: torch.dtype) -> Tensor:
    """Return one end of a transfer in the memory of `storage` [*any]: [*shape], or [*shape, width] as bits.

    Elements wider than `dtype` are sent as several items. Raises ValueError like `strided_view`, and for a storage with
    narrower elements: float32 values are never rounded on their way.
    """
    width = transfer.width
    if width == 1:
        return strided_view(storage, view, transfer.shape, transfer.name)
    if storage.itemsize != dtype.itemsize * width:
        raise ValueError(
            f"{transfer.name}: the tensor {view.storage} is {storage.dtype}, but it must be float32 in models of any "
            "dtype; rounding it would change the model"
        )
    item_view = View(view.storage, view.offset * width, (*(stride * width for stride in view.strides), 1))
    return strided_view(storage.detach().flatten().view(dtype), item_view, (*transfer.shape, width), transfer.name)


def _bind_buckets(
    plan: RankPlan,
    sources: Mapping[str, Tensor],
    destinations: Mapping[str, Tensor],
    slots: PrivateSlots | SharedSlots,
    dtype: torch.dtype,
) -> Iterator[_BoundBucket]:
    """Yield the plan's buckets, with views of the tensors and of the staging memory `slots`."""

    def source_view(transfer: Transfer) -> Tensor:
        return transfer_view(_storage(sources, transfer.source.storage), transfer.source, transfer, dtype)

    def destination_view(transfer: Transfer) -> Tensor:
        return transfer_view(
            _storage(destinations, transfer.destination.storage), transfer.destination, transfer, dtype
        )

    def staged_view(slot: Tensor, start: int, transfer: Transfer) -> Tensor:
        """Return a transfer's view [*shape] in the staging buffer `slot` [elements], from element `start` on."""
        shape = transfer.shape if transfer.width == 1 else (*transfer.shape, transfer.width)
        return slot.narrow(0, start, transfer.numel).view(shape)

    exchange_index = 0
    for bucket in plan.buckets:
        local, pack, unpack = _CopyPairs(), _CopyPairs(), _CopyPairs()
        for transfer in bucket.local:
            local.add_copy(destination_view(transfer), source_view(transfer))
        if not bucket.is_exchanged:
            yield _BoundBucket(local, pack, unpack, None)
            continue
        outgoing, messages = slots.views(exchange_index)
        start = 0
        for transfer in bucket.sends:
            pack.add_copy(staged_view(outgoing, start, transfer), source_view(transfer))
            start += transfer.numel
        # On both sides, the elements of one sender follow each other in the order of the plan.
        starts = [0] * plan.num_ranks
        for transfer in bucket.receives:
            start = starts[transfer.source_rank]
            starts[transfer.source_rank] += transfer.numel
            unpack.add_copy(destination_view(transfer), staged_view(messages[transfer.source_rank], start, transfer))
        yield _BoundBucket(local, pack, unpack, exchange_index)
        exchange_index += 1


def _storage(storages: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in storages:
        raise ValueError(f"the reshard's plan needs storage {name}, but this rank does not have it")
    return storages[name]


class _Clock:
    """Seconds by stage: host time on a CPU, stream time on CUDA, because CUDA launches are asynchronous."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Context that adds its duration to the stage `name`: GPU time from events, or the host's time."""
        if self._device.type == "cuda":
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._events.append((name, *events))
        else:
            start = time.perf_counter()
            yield
            self._host_seconds[name] += time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage and in total. The host waits for the stream."""
        if self._device.type == "cuda":
            # Synchronise this stream only: waiting for unrelated work of other streams would distort the times.
            torch.cuda.current_stream(self._device).synchronize()
        for name, start, stop in self._events:
            self._host_seconds[name] += start.elapsed_time(stop) / 1000
        names = dict.fromkeys(("pack", "wire", "local", "unpack", *self._host_seconds))
        return {name: self._host_seconds[name] for name in names} | {"total": time.perf_counter() - self._start}
