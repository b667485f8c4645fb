"""The transport: one rank carries its part of a plan out on live tensors, as often as asked.

Per bucket: remote elements are packed and sent off in one exchange; while they travel, local elements are copied in
place and the bucket before is unpacked. Destinations are written where they are and never rebound, since CUDA graphs
hold their addresses. Two buckets of staging memory exist at most.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.weights.plan import RankBucket, RankPlan, Transfer, View


@dataclass(slots=True)
class _Copies:
    """Destination views and the source views that fill them, pair by pair."""

    destinations: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)

    def add(self, destination: Tensor, source: Tensor) -> None:
        self.destinations.append(destination)
        self.sources.append(source)

    def run(self) -> None:
        if self.destinations:
            torch._foreach_copy_(self.destinations, self.sources)  # pyright: ignore[reportPrivateImportUsage]


@dataclass(slots=True)
class _Step:
    """A bucket, all its views made."""

    local: _Copies
    pack: _Copies
    unpack: _Copies
    outgoing: Tensor
    incoming: Tensor
    send_splits: list[int]
    receive_splits: list[int]
    is_exchanged: bool


class Transport:
    """A rank's plan bound to its storages: `reshard` moves the weights.

    `sources` and `destinations` are contiguous tensors by storage name, read and written in place; they must keep
    their memory. `dtype` is the type on the wire, of the plan's item size and the same on all ranks; values are cast
    where a storage has another. Rank i of the plan is rank i of `group`. Raises ValueError for a storage that is
    missing or too small.
    """

    def __init__(
        self,
        plan: RankPlan,
        sources: Mapping[str, Tensor],
        destinations: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if dtype.itemsize != plan.itemsize:
            raise ValueError(f"the plan counts {plan.itemsize} bytes an element, {dtype} has {dtype.itemsize}")
        if any(b.is_exchanged for b in plan.buckets) and dist.get_world_size(group) != plan.num_ranks:
            raise ValueError(f"the plan is for {plan.num_ranks} ranks, the group has {dist.get_world_size(group)}")
        storages = [*sources.values(), *destinations.values()]
        self._device = next((s.device for s in storages if s.is_cuda), torch.device("cpu"))
        self._group = group
        slots = [torch.empty(plan.staging_numel, dtype=dtype, device=self._device) for _ in plan.buckets[:2]]
        self._steps = [
            _bind(bucket, plan.num_ranks, sources, destinations, slots[index % 2])
            for index, bucket in enumerate(plan.buckets)
        ]
        count = {
            "local": sum(t.numel for b in plan.buckets for t in b.local),
            "sent": sum(t.numel for b in plan.buckets for t in b.sends),
            "received": sum(t.numel for b in plan.buckets for t in b.receives),
        }
        self._bytes = {f"{kind}_bytes": float(numel * plan.itemsize) for kind, numel in count.items()}

    @torch.no_grad()
    def reshard(self) -> dict[str, float]:
        """Move all weights, in lockstep with the other ranks.

        Returns seconds spent packing, waiting for the wire, copying locally and unpacking (`pack_seconds`,
        `wire_seconds`, `local_seconds`, `unpack_seconds`), their wall time `total_seconds`, and bytes `local`,
        `sent`, `received`.
        """
        clock = _Clock(self._device)
        travelling: tuple[_Step, dist.Work] | None = None
        for step in self._steps:
            work = None
            if step.is_exchanged:
                with clock.stage("pack"):
                    step.pack.run()
                with clock.stage("wire"):
                    work = dist.all_to_all_single(
                        step.incoming, step.outgoing, step.receive_splits, step.send_splits, self._group, async_op=True
                    )
            with clock.stage("local"):
                step.local.run()
            self._arrive(travelling, clock)
            travelling = (step, work) if work is not None else None
        self._arrive(travelling, clock)
        return clock.seconds() | self._bytes

    @staticmethod
    def _arrive(travelling: tuple[_Step, dist.Work] | None, clock: _Clock) -> None:
        if travelling is not None:
            step, work = travelling
            with clock.stage("wire"):
                work.wait()
            with clock.stage("unpack"):
                step.unpack.run()


def strided_view(storage: Tensor, view: View, shape: Sequence[int], name: str) -> Tensor:
    """The elements a plan's view means, sharing the storage's memory."""
    last = view.offset + sum((n - 1) * s for n, s in zip(shape, view.strides, strict=True))
    if not storage.is_contiguous() or last >= storage.numel():
        raise ValueError(
            f"{name}: element {last} of storage {view.storage} is needed, which has {storage.numel()} elements"
            f"{'' if storage.is_contiguous() else ' and is not contiguous'}"
        )
    return storage.detach().as_strided(shape, view.strides, storage.storage_offset() + view.offset)


def _bind(
    bucket: RankBucket,
    num_ranks: int,
    sources: Mapping[str, Tensor],
    destinations: Mapping[str, Tensor],
    slot: Tensor,
) -> _Step:
    def source(t: Transfer) -> Tensor:
        return strided_view(_storage(sources, t.source.storage), t.source, t.shape, t.name)

    def destination(t: Transfer) -> Tensor:
        return strided_view(_storage(destinations, t.destination.storage), t.destination, t.shape, t.name)

    local, pack, unpack = _Copies(), _Copies(), _Copies()
    send_splits, receive_splits = [0] * num_ranks, [0] * num_ranks
    start = 0
    for t in bucket.local:
        local.add(destination(t), source(t))
    for t in bucket.sends:
        pack.add(slot[start : start + t.numel].view(t.shape), source(t))
        send_splits[t.destination_rank] += t.numel
        start += t.numel
    middle = start
    for t in bucket.receives:
        unpack.add(destination(t), slot[start : start + t.numel].view(t.shape))
        receive_splits[t.source_rank] += t.numel
        start += t.numel
    return _Step(
        local, pack, unpack, slot[:middle], slot[middle:start], send_splits, receive_splits, bucket.is_exchanged
    )


def _storage(storages: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in storages:
        raise ValueError(f"the plan needs storage {name}, which this rank does not have")
    return storages[name]


class _Clock:
    """Seconds by stage: of the host on CPU, of the stream on CUDA, where launches return at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self._device.type == "cuda":
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._events.append((name, *events))
        else:
            start = time.perf_counter()
            yield
            self._host[name] += time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for name, start, stop in self._events:
            self._host[name] += start.elapsed_time(stop) / 1000
        stages = {f"{name}_seconds": self._host[name] for name in ("pack", "wire", "local", "unpack")}
        return stages | {"total_seconds": time.perf_counter() - self._start}
