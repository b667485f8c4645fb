"""The proof of a reshard on live memory: checksums of what the trainers hold against what the engines hold.

Where the elements of a copy come from, their checksum is taken before they would be packed, and travels; where they
went, it is taken anew from the live parameter. Nothing of a tensor is sent a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.types import MegarlError
from megarl.weights.plan import RankPlan, Transfer
from megarl.weights.transport import strided_view

_CHUNK = 1 << 20
_RADIX = 6364136223846793005
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def verify(
    plan: RankPlan, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor], *, dtype: torch.dtype
) -> None:
    """Compare every copy of a rank's plan with its source; all ranks call this together.

    `sources`, `destinations` and `dtype` are those of the plan's `Transport`. Raises MegarlError, on all ranks the
    same, with the first live parameter that differs.
    """

    def at_source(t: Transfer) -> Tensor:
        return checksum(strided_view(sources[t.source.storage], t.source, t.shape, t.name), dtype)

    def at_destination(t: Transfer) -> Tensor:
        return checksum(strided_view(destinations[t.destination.storage], t.destination, t.shape, t.name), dtype)

    local = [t for bucket in plan.buckets for t in bucket.local]
    # Buckets list the copies between two ranks in the same order on both, and so does a stable sort of all buckets.
    sends = sorted((t for bucket in plan.buckets for t in bucket.sends), key=lambda t: t.destination_rank)
    receives = sorted((t for bucket in plan.buckets for t in bucket.receives), key=lambda t: t.source_rank)
    expected = torch.cat([_stacked([at_source(t) for t in local]), _exchange(plan, sends, receives, at_source)])
    found = _stacked([at_destination(t) for t in (*local, *receives)])
    wrong = (expected.cpu() != found.cpu()).nonzero().flatten().tolist()
    first = (*local, *receives)[wrong[0]] if wrong else None
    reports = [None if first is None else (first.destination.storage, first.name, len(wrong))] * plan.num_ranks
    if plan.num_ranks > 1:
        dist.all_gather_object(reports, reports[0])
    for rank, report in enumerate(reports):
        if report is not None:
            raise MegarlError(
                f"rank {rank}: the engine's parameter {report[0]} does not hold the trainer's {report[1]} after a "
                f"reshard ({report[2]} of this rank's copies differ). Please report this with the recipe."
            )


def checksum(values: Tensor, dtype: torch.dtype) -> Tensor:
    """64 bits, int64 [], of the elements as `dtype`, in their order: any element or two exchanged change it."""
    bits = values.to(dtype).contiguous().flatten().view(_INTEGERS[dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in bits.split(_CHUNK):
        # Integer overflow wraps; odd multipliers make every element count in all 64 bits.
        total = total * _RADIX + (part.to(torch.int64) * _multipliers(values.device)[: len(part)]).sum()
    return total


@cache
def _multipliers(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _CHUNK, 2, device=device) * 0x5851F42D4C957F2D


def _exchange(plan: RankPlan, sends: list[Transfer], receives: list[Transfer], at_source) -> Tensor:
    """The checksums of what this rank received, from the ranks that hold the sources."""
    outgoing = _stacked([at_source(t) for t in sends])
    if plan.num_ranks == 1:
        return outgoing
    counts = [[0] * plan.num_ranks, [0] * plan.num_ranks]
    for t in sends:
        counts[0][t.destination_rank] += 1
    for t in receives:
        counts[1][t.source_rank] += 1
    # A rank of disjoint roles may hold no tensor and know no device: the world's backend decides.
    device = torch.device("cuda" if dist.get_backend() == "nccl" else outgoing.device)
    incoming = torch.empty(len(receives), dtype=torch.int64, device=device)
    dist.all_to_all_single(incoming, outgoing.to(device), counts[1], counts[0])
    return incoming.to(outgoing.device)


def _stacked(checksums: list[Tensor]) -> Tensor:
    return torch.stack(checksums) if checksums else torch.zeros(0, dtype=torch.int64)
