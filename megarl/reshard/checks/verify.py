"""Verification of a reshard: checksums of the trainers' live parameters, compared with the engines' live parameters.

The source rank of a copy computes the checksum of its elements and sends it. The destination rank computes its own
checksum from the live parameter. Only weights quantised by an engine are sent again. The engine takes their checksums
on arrival, quantises them again and compares the result with its live parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.groups import cross_world, signed
from megarl.reshard.checks.fingerprint import checksum
from megarl.reshard.plan import RankPlan, Transfer
from megarl.reshard.transport import device_of, transfer_view
from megarl.types import MegarlError


def verify(
    plan: RankPlan,
    sources: Mapping[str, Tensor],
    destinations: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    taken: Mapping[Transfer, Tensor] | None = None,
    differing: Sequence[str] = (),
) -> None:
    """Compare every copy [*shape] of a rank's plan with its source. A collective.

    `sources`, `destinations`, `dtype` and `group` are the arguments of the plan's `Transport`. `taken` maps copies to
    this rank to checksums taken earlier, for elements no longer at their destination. `differing` lists live parameters
    found different from the quantised weights. Raises MegarlError on all ranks, naming the first live parameter that
    differs.
    """

    copies, expected, found = copy_checksums(plan, sources, destinations, dtype=dtype, group=group, taken=taken)
    wrong = (expected.cpu() != found.cpu()).nonzero().flatten().tolist()
    own = None
    if wrong:
        first = copies[wrong[0]]
        own = first.destination.storage, f"the trainer's {first.name}", f"{len(wrong)} of this rank's copies"
    elif differing:
        own = differing[0], "the trainer's weights as vLLM quantises them", f"{len(differing)} of this rank's tensors"
    reports = signed.gather(own, group, purpose="verification") if plan.num_ranks > 1 else [own]
    for rank, report in enumerate(reports):
        if report is not None:
            raise MegarlError(
                f"rank {rank}: the engine's parameter {report[0]} does not hold {report[1]} after a reshard "
                f"({report[2]} differ). Please report this with the recipe."
            )


def copy_checksums(
    plan: RankPlan,
    sources: Mapping[str, Tensor],
    destinations: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    taken: Mapping[Transfer, Tensor] | None = None,
) -> tuple[list[Transfer], Tensor, Tensor]:
    """Return the plan's copies into this rank's storages, and two checksums of each: of its source and of its copy.

    A collective. Both checksum tensors are int64 [copies], on the device of this rank's tensors. Checksums found
    in `taken` are not computed again.
    """

    def at_source(t: Transfer) -> Tensor:
        return checksum(transfer_view(sources[t.source.storage], t.source, t, dtype).to(dtype))

    def at_destination(t: Transfer) -> Tensor:
        if taken is not None and t in taken:
            return taken[t]
        return checksum(transfer_view(destinations[t.destination.storage], t.destination, t, dtype).to(dtype))

    device = device_of([*sources.values(), *destinations.values()])
    local = [t for bucket in plan.buckets for t in bucket.local]
    # Checksums travel without names, so both ranks must order them alike. Buckets list the copies between two ranks in
    # the same order on both, and a stable sort keeps this order.
    sends = sorted((t for bucket in plan.buckets for t in bucket.sends), key=lambda t: t.destination_rank)
    receives = sorted((t for bucket in plan.buckets for t in bucket.receives), key=lambda t: t.source_rank)
    incoming = _exchange(plan, sends, receives, _stacked(map(at_source, sends), device), group)
    expected = torch.cat([_stacked(map(at_source, local), device), incoming])
    return [*local, *receives], expected, _stacked(map(at_destination, [*local, *receives]), device)


def _exchange(
    plan: RankPlan,
    sends: list[Transfer],
    receives: list[Transfer],
    outgoing: Tensor,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Exchange the checksums of sent elements. Returns those for the copies received by this rank: int64
    [receives].
    """
    if plan.num_ranks == 1:
        return outgoing
    counts = [[0] * plan.num_ranks, [0] * plan.num_ranks]
    for t in sends:
        counts[0][t.destination_rank] += 1
    for t in receives:
        counts[1][t.source_rank] += 1
    # A rank without copies must take part too. The device of its empty tensors selects the backend (gloo or NCCL).
    incoming = torch.empty(len(receives), dtype=torch.int64, device=outgoing.device)
    work = dist.all_to_all_single(incoming, outgoing, counts[1], counts[0], group, async_op=True)
    cross_world.finish(work, group, is_on_host=incoming.is_cpu)
    return incoming


def _stacked(checksums: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return checksums in one tensor, int64 [num_checksums], empty for none."""
    stacked = list(checksums)
    return torch.stack(stacked).to(device) if stacked else torch.zeros(0, dtype=torch.int64, device=device)
