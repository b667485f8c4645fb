"""Staging memory of a reshard: two slots used in turn, private or shared between processes of one machine.

Order of an exchange: `claim` (wait for the slot), pack, `depart` (send), `arrive` (wait for the peers' data), unpack,
`release`. The next exchange may depart before this one arrives.
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

from megarl.files.pid_space import boot_id, pid_namespace
from megarl.groups import cross_world, signed
from megarl.groups.peer_errors import PeerGoneError
from megarl.reshard.plan import RankBucket, RankPlan

Value = TypeVar("Value")

_END_MILLISECONDS = 1000
"""Milliseconds to wait for the end of a peer process with closed files."""


class PrivateSlots:
    """Two slots of staging memory of this rank only. Each holds what the rank sends and receives in one exchange."""

    def __init__(
        self, plan: RankPlan, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._slots = [torch.empty(plan.staging_numel, dtype=dtype, device=device) for _ in plan.buckets[:2]]
        self.num_bytes = sum(slot.nbytes for slot in self._slots)
        self._group = group
        self._splits = [count_elements(plan, bucket) for bucket in plan.buckets if bucket.is_exchanged]
        self._in_flight: deque[dist.Work] = deque()

    def views(self, exchange: int) -> tuple[Tensor, Sequence[Tensor]]:
        """Return views of an exchange's slot: one part to pack the outgoing elements into, [sent], and one part per
        rank with the elements received from it, [received] each.
        """
        outgoing, incoming = self._parts(exchange)
        return outgoing, incoming.split(self._splits[exchange][1])

    def claim(self, exchange: int) -> None:
        """Do nothing: `arrive` already waited for the slot's earlier exchange."""

    def depart(self, exchange: int) -> None:
        sent, received = self._splits[exchange]
        outgoing, incoming = self._parts(exchange)
        work = dist.all_to_all_single(incoming, outgoing, received, sent, self._group, async_op=True)
        self._in_flight.append(cross_world.register(work, self._group))

    def arrive(self) -> None:
        cross_world.wait(self._in_flight.popleft(), self._group, is_on_host=self._slots[0].is_cpu)

    def release(self) -> None:
        """Do nothing: no peer reads a private slot."""

    def _parts(self, exchange: int) -> tuple[Tensor, Tensor]:
        sent, received = map(sum, self._splits[exchange])
        slot = self._slots[exchange % 2]
        return slot.narrow(0, 0, sent), slot.narrow(0, sent, received)


class SharedSlots:
    """Two slots of shared memory for the elements that this rank sends. Other ranks map them and unpack from them.

    The first page has three int64: how many exchanges this rank packed, how many it unpacked, and 1 after it left.
    """

    # A whole page keeps the slots aligned. Half an hour is far above any exchange: a dead peer is noticed sooner
    # through its pidfd.
    _HEAD_BYTES = mmap.PAGESIZE
    _PATIENCE_SECONDS = 1800.0

    def __init__(self, plan: RankPlan, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        """Create this rank's shared memory, map that of all ranks, and find the peers of each exchange.

        A collective.
        """
        self._rank, self._group = plan.rank, group
        exchanged = [bucket for bucket in plan.buckets if bucket.is_exchanged]
        self._sent, self._received = zip(*(count_elements(plan, bucket) for bucket in exchanged), strict=True)
        slot_numel = max(map(sum, self._sent))
        self._peer_ends = select.poll()
        # A memfd has no name, so no file remains after a crash. Peers open it through /proc/PID/fd before it is closed.
        file_number = os.memfd_create("megarl-reshard")
        try:
            os.ftruncate(file_number, self._HEAD_BYTES + 2 * slot_numel * dtype.itemsize)
            peers = gather_values((os.getpid(), file_number, slot_numel, self._sent), group)
            memory_maps = self._map_memory([(process, number) for process, number, *_ in peers])
            gather_values(None, group)  # A barrier: all peers must have mapped the file before it is closed.
        finally:
            os.close(file_number)
        # The two slots follow the first page.
        self._counts = [torch.frombuffer(memory_map, dtype=torch.int64, count=3).numpy() for memory_map in memory_maps]
        weakref.finalize(self, _record_departure, self._counts[self._rank])
        self._slots = [
            torch.frombuffer(memory_map, dtype=dtype, offset=self._HEAD_BYTES).split(slot_numel) if slot_numel else ()
            for memory_map, (_, _, slot_numel, _) in zip(memory_maps, peers, strict=True)
        ]
        self.num_bytes = sum(slot.nbytes for slot in self._slots[plan.rank])
        """Bytes of this rank's two slots; 0 for a rank that sends nothing."""
        self._message_starts = [[sum(counts[: plan.rank]) for counts in sent] for _, _, _, sent in peers]
        """First element of this rank's message in the slot of each peer, by exchange."""
        self._senders = [
            rank for rank, slot_numel in enumerate(map(sum, zip(*self._received, strict=True))) if slot_numel
        ]
        self._readers = [rank for rank, slot_numel in enumerate(map(sum, zip(*self._sent, strict=True))) if slot_numel]
        self._empty = torch.empty(0, dtype=dtype)

    def _map_memory(self, files: Sequence[tuple[int, int]]) -> list[mmap.mmap]:
        """Map the other ranks' shared memory, and set `_peer_ends`, which signals the end of a peer's process.

        `files` are pairs of process id and file descriptor.
        """
        process_files: list[int] = []
        weakref.finalize(self, _close_all, process_files)
        try:
            for process, _ in files:
                process_files.append(os.pidfd_open(process))
                self._peer_ends.register(process_files[-1], select.POLLIN)
            return [_map_file(Path(f"/proc/{process}/fd/{number}")) for process, number in files]
        except (FileNotFoundError, ProcessLookupError) as error:
            raise PeerGoneError(f"a rank taking part in the reshard has ended or left: {error}") from error
        except PermissionError as error:
            # Linux gives the /proc files of a zombie process to root: a peer that just died looks like a refused
            # permission.
            if self._peer_ends.poll(_END_MILLISECONDS):
                raise PeerGoneError("a rank taking part in the reshard has ended") from error
            raise

    def views(self, exchange: int) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the elements that this rank sends [sent], and from each rank the elements that this rank receives
        [received].

        The received elements are views of the other ranks' memory.
        """
        messages = [self._empty] * len(self._slots)
        for rank, numel in enumerate(self._received[exchange]):
            if numel:
                messages[rank] = self._slots[rank][exchange % 2].narrow(0, self._message_starts[rank][exchange], numel)
        sent = sum(self._sent[exchange])
        return self._slots[self._rank][exchange % 2][:sent] if sent else self._empty, messages

    def claim(self, exchange: int) -> None:
        """Wait until all other ranks have read the slot's earlier exchange."""
        packed = self._counts[self._rank][0]
        # The previous exchange may still be unread in the other slot. Before the first exchange of a reshard everything
        # must be read: the earlier reshard's last exchange may have used either slot.
        self._wait_for_ranks(self._readers, lambda rank: self._counts[rank][1] >= packed - (exchange > 0))

    def depart(self, exchange: int) -> None:
        self._counts[self._rank][0] += 1

    def arrive(self) -> None:
        read = self._counts[self._rank][1]
        self._wait_for_ranks(self._senders, lambda rank: self._counts[rank][0] > read)

    def release(self) -> None:
        self._counts[self._rank][1] += 1

    def _wait_for_ranks(self, ranks: Iterable[int], is_ready: Callable[[int], bool]) -> None:
        """Wait until `is_ready` for each rank.

        Raises PeerGoneError if a rank has ended or left, TimeoutError after the patience.
        """
        start, nap = time.monotonic(), 0.0
        for rank in ranks:
            while not is_ready(rank):
                time.sleep(nap)
                # The first check does not sleep. Later, 50 microseconds keep the latency low without a busy loop.
                nap = 5e-5
                if self._peer_ends.poll(0):
                    raise PeerGoneError("a rank taking part in the reshard has ended")
                # A peer may leave after its last exchange is complete, so check again.
                if self._counts[rank][2] and not is_ready(rank):
                    raise PeerGoneError(f"rank {rank} has left the reshard")
                cross_world.check(self._group)
                if time.monotonic() - start > self._PATIENCE_SECONDS:
                    raise TimeoutError(f"rank {self._rank} waited {self._PATIENCE_SECONDS:.0f} s for rank {rank}")


def _record_departure(counts: NDArray[np.int64]) -> None:
    counts[2] = 1


def _close_all(descriptors: Iterable[int]) -> None:
    for number in descriptors:
        os.close(number)


def _map_file(file: Path) -> mmap.mmap:
    with file.open("r+b", buffering=0) as opened:
        return mmap.mmap(opened.fileno(), 0)


def is_one_machine(is_willing: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether all ranks pass `is_willing` and run on one machine under one user. A collective.

    Shared slots need x86-64: it makes stores visible in program order, so the counters need no memory fence.
    """
    is_ordered = platform.machine() in ("x86_64", "AMD64")
    names = boot_id(), pid_namespace(), os.getuid()
    machines = set(gather_values(names if is_willing and is_ordered else None, group))
    return len(machines) == 1 and None not in machines


def gather_values(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return every rank's value, by rank. A collective."""
    return signed.gather(value, group, purpose="weights")


def count_elements(plan: RankPlan, bucket: RankBucket) -> tuple[list[int], list[int]]:
    """Return the elements of a bucket sent to each rank, and received from each rank."""
    sent, received = [0] * plan.num_ranks, [0] * plan.num_ranks
    for transfer in bucket.sends:
        sent[transfer.destination_rank] += transfer.numel
    for transfer in bucket.receives:
        received[transfer.source_rank] += transfer.numel
    return sent, received
