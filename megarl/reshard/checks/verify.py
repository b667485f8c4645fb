"""Verification of a reshard: checksums of the trainers' live parameters, compared with the engines' checksums.

Both sides compute checksums of the same boxes (index ranges of tensors). A checksum depends on values and on places in
the tensor. Equal checksums thus prove plan and transport, but not the layouts: see `checks.file_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.families.tensors.names import TensorName
from megarl.groups import cross_world, signed
from megarl.reshard.boxes import Box, Piece
from megarl.reshard.checks.ledger import Ledger
from megarl.reshard.overlap import Overlap, Region
from megarl.reshard.plan import Plan
from megarl.reshard.transport import device_of
from megarl.reshard.world import Holding
from megarl.types import MegarlError

_NOT_STORED = torch.iinfo(torch.int64).max
"""Checksum of a box that a rank does not store. The minimum over the ranks ignores it."""


class LedgerComparison:
    """One rank's part in the comparison of trainer and engine after a reshard.

    `sources` (trainer) and `destinations` (engine) map storages to tensors [*shape]. `dtype` is the type of sent
    elements. Rank i of the plan is rank i of `group`.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        sources: Mapping[str, Tensor],
        destinations: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Make a ledger of this rank's trainer pieces and one of its engine pieces.

        Boxes have equal numbers on all ranks.
        """
        self._num_ranks, self._rank, self._group = plan.num_ranks, rank, group
        source_pieces, engine_pieces, self._num_boxes = common_pieces(plan, rank)
        self._device = device_of([*sources.values(), *destinations.values()])
        self._source_numbers, self._engine_numbers = (
            torch.tensor(list(pieces), dtype=torch.int64).to(self._device) for pieces in (source_pieces, engine_pieces)
        )
        self._source_pieces, self._engine_pieces = list(source_pieces.values()), list(engine_pieces.values())
        # Tensors that are float32 in models of any dtype are sent and compared unrounded.
        float32_names = {step.tensor.name for step in plan.steps if plan.width(step.tensor) > 1}

        def make_ledger(holder: str, pieces: Mapping[int, Piece], tensors: Mapping[str, Tensor]) -> Ledger:
            """`tensors` are [*shape]. `holder`: trainer or engine."""
            dtypes = [torch.float32 if piece.box.name in float32_names else dtype for piece in pieces.values()]
            return Ledger(f"{holder} rank {rank}", tuple(pieces.values()), tensors, cast_to=dtypes)

        self._source = make_ledger("trainer", source_pieces, sources)
        self.engine = make_ledger("engine", engine_pieces, destinations)

    def verify(self, values: Mapping[int, Tensor], differing: Sequence[str] = ()) -> None:
        """Compare this rank's checksums with the checksums of all ranks. A collective.

        `values` has the checksum of each engine piece by index, int64 [scalar]. `differing` lists live parameters that
        differ from the converted weights. Raises MegarlError on all ranks, naming the first parameter that differs. If
        trainer ranks with the same weights differ, it names them.
        """
        source_values = self._stack(self._source.compute())
        engine_values = self._stack(values)
        expected_values = torch.full((self._num_boxes,), _NOT_STORED, dtype=torch.int64, device=self._device)
        expected_values.scatter_(0, self._source_numbers, source_values)
        if self._num_ranks > 1:
            # All trainers with a box should have the same value: the minimum.
            work = dist.all_reduce(expected_values, dist.ReduceOp.MIN, self._group, async_op=True)
            cross_world.finish(work, self._group, is_on_host=expected_values.is_cpu)
        is_other = (source_values != expected_values.gather(0, self._source_numbers)).tolist()
        outlier = self._source_pieces[is_other.index(True)].box.name if any(is_other) else None
        fault = self._find_fault(engine_values != expected_values.gather(0, self._engine_numbers), differing)
        faults = [(fault, outlier)]
        if self._num_ranks > 1:
            faults = signed.gather((fault, outlier), self._group, purpose="verification")
        # Trainers first: if their copies differ, an engine may have received any copy.
        if outliers := {rank: outlier for rank, (_, outlier) in enumerate(faults) if outlier is not None}:
            raise MegarlError(
                f"the trainer's ranks {list(outliers)} hold other values of {next(iter(outliers.values()))} than other "
                "ranks with the same weights. Please report this with the recipe."
            )
        for rank, (fault, _) in enumerate(faults):
            if fault is not None:
                raise MegarlError(f"rank {rank}: {fault}. Please report this with the recipe.")

    def _find_fault(self, is_wrong: Tensor, differing: Sequence[str]) -> str | None:
        """Return in words this rank's first wrong parameter. `is_wrong`: bool [engine pieces]."""
        wrong_flags = is_wrong.tolist()
        if any(wrong_flags):
            piece = self._engine_pieces[wrong_flags.index(True)]
            parameter, expected_text = piece.storage, f"the trainer's {piece.box.name}"
            count_text = f"{sum(wrong_flags)} of this rank's boxes"
        elif differing:
            parameter, expected_text = differing[0], "the trainer's weights as vLLM quantises them"
            count_text = f"{len(differing)} of this rank's tensors"
        else:
            return None
        return f"the engine's parameter {parameter} does not hold {expected_text} after a reshard ({count_text} differ)"

    def _stack(self, values: Mapping[int, Tensor]) -> Tensor:
        ordered = [values[index] for index in range(len(values))]
        return (
            torch.stack(ordered).to(self._device) if ordered else torch.zeros(0, dtype=torch.int64, device=self._device)
        )


def common_pieces(plan: Plan, rank: int) -> tuple[dict[int, Piece], dict[int, Piece], int]:
    """Number the boxes (parts of tensors) that trainer and engines have in common, and return this rank's boxes.

    Boxes are numbered over all ranks. Returns this rank's trainer pieces and its engine pieces, both by box number, and
    the number of all boxes.
    """

    @cache
    def roles_in_flows(overlap: Overlap) -> list[tuple[bool, bool]]:
        return [(rank in flow.holders, rank in flow.takers) for flow in overlap.flows]

    sources: dict[int, Piece] = {}
    destinations: dict[int, Piece] = {}
    box_number = 0
    for tensor, overlap, _, _ in plan.steps:
        for flow, (is_holder, is_taker) in zip(overlap.flows, roles_in_flows(overlap), strict=True):
            for region in flow.regions:
                if is_holder:
                    holding = next(holding for holding in region.sources if rank in holding.ranks)
                    sources[box_number] = _cut_to_region(holding, region, tensor)
                if is_taker:
                    destinations[box_number] = _cut_to_region(region.destination, region, tensor)
                box_number += 1
    return sources, destinations, box_number


def _cut_to_region(holding: Holding, region: Region, tensor: TensorName) -> Piece:
    # A fault in the arithmetic of `overlap` would stay hidden if it were used here.
    piece = holding.piece(tensor)
    steps = zip(region.start, holding.start, holding.strides, strict=True)
    offset = piece.offset + sum((start - holding_first) * stride for start, holding_first, stride in steps)
    return Piece(Box(tensor.name, region.start, region.stop), piece.storage, offset, piece.strides)
