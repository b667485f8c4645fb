"""Staging memory of the transport: two slots that buckets take in turn, a rank's own or shared on one machine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.weights.plan import RankBucket, RankPlan

Value = TypeVar("Value")


class OwnSlots:
    """Two slots in a rank's own memory, each for all that it sends and receives in a bucket."""

    def __init__(self, plan: RankPlan, dtype: torch.dtype, device: torch.device) -> None:
        self._slots = [torch.empty(plan.staging_numel, dtype=dtype, device=device) for _ in plan.buckets[:2]]

    def of(self, exchange: int, sent: list[int], received: list[int]) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """For one exchange: what to send, what comes, and of it what comes from each rank."""
        slot = self._slots[exchange % 2]
        incoming = slot[sum(sent) : sum(sent) + sum(received)]
        return slot[: sum(sent)], incoming, incoming.split(received)


class SharedSlots:
    """Two slots of what a rank sends in a bucket, mapped by its peers, which read where it packed."""

    def __init__(self, plan: RankPlan, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        self._rank = plan.rank
        self._sent = [splits(plan, bucket)[0] for bucket in plan.buckets if bucket.is_exchanged]
        senders = {t.source_rank for bucket in plan.buckets for t in bucket.receives}
        numel = max(map(sum, self._sent))
        file = os.memfd_create("megarl-reshard")
        os.ftruncate(file, max(2 * numel * dtype.itemsize, 1))
        peers = gathered((os.getpid(), file, numel, self._sent), group)
        self._slots: dict[int, tuple[Tensor, ...]] = {}
        self._starts: dict[int, list[int]] = {}
        for rank, (process, number, numel, sent) in enumerate(peers):
            if numel and (rank in senders or rank == plan.rank):
                self._slots[rank] = _mapped(Path(f"/proc/{process}/fd/{number}"), 2 * numel, dtype).split(numel)
                self._starts[rank] = [sum(counts[: plan.rank]) for counts in sent]
        self._nothing = torch.empty(0, dtype=dtype)
        dist.barrier(group)
        os.close(file)

    def of(self, exchange: int, sent: list[int], received: list[int]) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """For one exchange: what to send, nothing that comes by itself, and what each rank has put down."""
        messages = [self._nothing] * len(received)
        for rank, numel in enumerate(received):
            if numel:
                messages[rank] = self._slots[rank][exchange % 2].narrow(0, self._starts[rank][exchange], numel)
        own = self._slots.get(self._rank)
        return own[exchange % 2][: sum(sent)] if own else self._nothing, self._nothing, messages


def _mapped(file: Path, numel: int, dtype: torch.dtype) -> Tensor:
    with file.open("r+b", buffering=0) as opened:
        return torch.frombuffer(mmap.mmap(opened.fileno(), numel * dtype.itemsize), dtype=dtype)


def is_one_machine(is_willing: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks are willing, on one machine, and let each other open their files."""
    names = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid"), os.getuid()
    machines = set(gathered(names if is_willing else None, group))
    return len(machines) == 1 and None not in machines


def gathered(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Every rank's value, by rank."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def splits(plan: RankPlan, bucket: RankBucket) -> tuple[list[int], list[int]]:
    """Elements sent to and received from each rank."""
    sent, received = [0] * plan.num_ranks, [0] * plan.num_ranks
    for t in bucket.sends:
        sent[t.destination_rank] += t.numel
    for t in bucket.receives:
        received[t.source_rank] += t.numel
    return sent, received
