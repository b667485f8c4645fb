"""Staging memory of the transport: two slots that buckets use in turn, private or shared on one machine.

An exchange is: `claim` the slot, pack into it, `depart` (send), `arrive` (wait for what the others sent), unpack,
`release`. An exchange arrives at the latest after the next one departs.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megarl.platform import bridge, signed
from megarl.platform.left_collective import PeerGoneError
from megarl.reshard.plan import RankBucket, RankPlan

Value = TypeVar("Value")

_END_MILLISECONDS = 1000
"""From the end of a process's files to its own."""


class OwnSlots:
    """Two private slots, each for all that a rank sends and receives in a bucket."""

    def __init__(
        self, plan: RankPlan, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._slots = [torch.empty(plan.staging_numel, dtype=dtype, device=device) for _ in plan.buckets[:2]]
        self._group = group
        self._splits = [splits(plan, bucket) for bucket in plan.buckets if bucket.is_exchanged]
        self._travelling: deque[dist.Work] = deque()

    def of(self, exchange: int) -> tuple[Tensor, Sequence[Tensor]]:
        """The views of an exchange: elements to send, and those received from each rank."""
        outgoing, incoming = self._parts(exchange)
        return outgoing, incoming.split(self._splits[exchange][1])

    def claim(self, exchange: int) -> None:
        """Nothing to wait for: the slot's earlier exchange has arrived on all ranks."""

    def depart(self, exchange: int) -> None:
        sent, received = self._splits[exchange]
        outgoing, incoming = self._parts(exchange)
        work = dist.all_to_all_single(incoming, outgoing, received, sent, self._group, async_op=True)
        self._travelling.append(bridge.begun(work, self._group))

    def arrive(self) -> None:
        bridge.wait(self._travelling.popleft(), self._group, is_on_host=self._slots[0].is_cpu)

    def release(self) -> None:
        """Nothing to tell: the slot is private."""

    def _parts(self, exchange: int) -> tuple[Tensor, Tensor]:
        """The parts of a slot: elements sent in an exchange, then elements received."""
        sent, received = map(sum, self._splits[exchange])
        slot = self._slots[exchange % 2]
        return slot.narrow(0, 0, sent), slot.narrow(0, sent, received)


class SharedSlots:
    """Two shared slots for what a rank sends in a bucket; its peers map them and unpack from there.

    Beside the slots: exchanges that the rank has packed, exchanges that it has read, and 1 once it has left.
    """

    _HEAD_BYTES = mmap.PAGESIZE
    _PATIENCE_SECONDS = 1800.0

    def __init__(self, plan: RankPlan, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        self._rank, self._group = plan.rank, group
        exchanged = [bucket for bucket in plan.buckets if bucket.is_exchanged]
        self._sent, self._received = zip(*(splits(plan, bucket) for bucket in exchanged), strict=True)
        numel = max(map(sum, self._sent))
        self._ended = select.poll()
        file = os.memfd_create("megarl-reshard")
        try:
            os.ftruncate(file, self._HEAD_BYTES + 2 * numel * dtype.itemsize)
            peers = gathered((os.getpid(), file, numel, self._sent), group)
            maps = self._map([(process, number) for process, number, *_ in peers])
            gathered(None, group)  # all have mapped it
        finally:
            os.close(file)
        self._counts = [torch.frombuffer(m, dtype=torch.int64, count=3).numpy() for m in maps]
        weakref.finalize(self, _tell_left, self._counts[self._rank])
        self._slots = [
            torch.frombuffer(m, dtype=dtype, offset=self._HEAD_BYTES).split(numel) if numel else ()
            for m, (_, _, numel, _) in zip(maps, peers, strict=True)
        ]
        self._starts = [[sum(counts[: plan.rank]) for counts in sent] for _, _, _, sent in peers]
        self._senders = [rank for rank, numel in enumerate(map(sum, zip(*self._received, strict=True))) if numel]
        self._readers = [rank for rank, numel in enumerate(map(sum, zip(*self._sent, strict=True))) if numel]
        self._nothing = torch.empty(0, dtype=dtype)

    def _map(self, files: Sequence[tuple[int, int]]) -> list[mmap.mmap]:
        """Map the peers' files, each a process and its descriptor; from now on `_ended` tells of a peer's end."""
        watched: list[int] = []
        weakref.finalize(self, _close_all, watched)
        try:
            for process, _ in files:
                watched.append(os.pidfd_open(process))
                self._ended.register(watched[-1], select.POLLIN)
            return [_mapped(Path(f"/proc/{process}/fd/{number}")) for process, number in files]
        except (FileNotFoundError, ProcessLookupError) as error:
            raise PeerGoneError(f"a rank of the reshard has ended or left: {error}") from error
        except PermissionError as error:
            # What has just ended, and is not yet waited for, belongs to root.
            if self._ended.poll(_END_MILLISECONDS):
                raise PeerGoneError("a rank of the reshard has ended") from error
            raise

    def of(self, exchange: int) -> tuple[Tensor, Sequence[Tensor]]:
        """The views of an exchange: elements to send, and those of each rank's slot for this rank."""
        messages = [self._nothing] * len(self._slots)
        for rank, numel in enumerate(self._received[exchange]):
            if numel:
                messages[rank] = self._slots[rank][exchange % 2].narrow(0, self._starts[rank][exchange], numel)
        sent = sum(self._sent[exchange])
        return self._slots[self._rank][exchange % 2][:sent] if sent else self._nothing, messages

    def claim(self, exchange: int) -> None:
        """Wait until all readers of the slot's earlier exchange have read it."""
        packed = self._counts[self._rank][0]
        # The last exchange before may have been in either slot.
        self._wait(self._readers, lambda rank: self._counts[rank][1] >= packed - (exchange > 0))

    def depart(self, exchange: int) -> None:
        self._counts[self._rank][0] += 1

    def arrive(self) -> None:
        read = self._counts[self._rank][1]
        self._wait(self._senders, lambda rank: self._counts[rank][0] > read)

    def release(self) -> None:
        self._counts[self._rank][1] += 1

    def _wait(self, ranks: Iterable[int], is_ready: Callable[[int], bool]) -> None:
        start, nap = time.monotonic(), 0.0
        for rank in ranks:
            while not is_ready(rank):
                time.sleep(nap)
                nap = 5e-5
                if self._ended.poll(0):
                    raise PeerGoneError("a rank of the reshard has ended")
                if self._counts[rank][2] and not is_ready(rank):
                    raise PeerGoneError(f"rank {rank} has left the reshard")
                bridge.check(self._group)
                if time.monotonic() - start > self._PATIENCE_SECONDS:
                    raise TimeoutError(f"rank {self._rank} waited {self._PATIENCE_SECONDS:.0f} s for rank {rank}")


def _tell_left(counts: NDArray[np.int64]) -> None:
    counts[2] = 1


def _close_all(descriptors: Iterable[int]) -> None:
    for number in descriptors:
        os.close(number)


def _mapped(file: Path) -> mmap.mmap:
    with file.open("r+b", buffering=0) as opened:
        return mmap.mmap(opened.fileno(), 0)


def is_one_machine(is_willing: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks are willing, and one user's on one machine that keeps the order of stores. A collective."""
    is_ordered = platform.machine() in ("x86_64", "AMD64")
    names = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid"), os.getuid()
    machines = set(gathered(names if is_willing and is_ordered else None, group))
    return len(machines) == 1 and None not in machines


def gathered(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Every rank's value, by rank. A collective."""
    return signed.gather(value, group, purpose="weights")


def splits(plan: RankPlan, bucket: RankBucket) -> tuple[list[int], list[int]]:
    """Elements sent to and received from each rank."""
    sent, received = [0] * plan.num_ranks, [0] * plan.num_ranks
    for t in bucket.sends:
        sent[t.destination_rank] += t.numel
    for t in bucket.receives:
        received[t.source_rank] += t.numel
    return sent, received
