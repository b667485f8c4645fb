"""Gathering of a sharded model's matrices for Muon's update: each is whole on one rank, its owner.

Tensor-parallel ranks store parts of a matrix, data-parallel ranks flat ranges of these parts. One plan copies them to
the owner, another copies the results back. Matrices go in rounds: no rank has more than about one at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.reshard.boxes import Layout, Piece, dense_piece
from megarl.reshard.plan import RankPlan, make_plan
from megarl.reshard.transport import Transport
from megarl.training.muon.owners import assign_owners, plan_rounds

BUCKET_BYTES = 1 << 28
"""Maximum bytes that a rank sends and receives at once."""
_WHOLE = "whole matrices"
"""Name of an owner's memory for a round's matrices."""
_DTYPE = torch.float32


@dataclass(frozen=True, slots=True)
class _Round:
    """A round of `MatrixExchange` on this rank. `gather` copies matrices to their owners, `scatter` copies them back.

    `matrices` lists the matrices owned by this rank: (first element in the flat buffer, shape).
    """

    gather: RankPlan
    scatter: RankPlan
    matrices: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def numel(self) -> int:
        return sum(prod(shape) for _, shape in self.matrices)


class MatrixExchange:
    """Replaces the values of whole matrices, sharded over the ranks of `group`, by a function of them.

    `layouts` has the pieces of matrices on each rank, equal on all ranks. `shapes` and `costs` (relative work) are by
    matrix name. `storages` are this rank's float32 tensors [*any] by name.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        shapes: Mapping[str, tuple[int, int]],
        costs: Mapping[str, int],
        storages: Mapping[str, Tensor],
        *,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        """Choose an owner of each matrix, by preference a rank that holds a part of it, then plan the rounds."""
        self._storages, self._device, self._group = storages, device, group
        holders: dict[str, set[int]] = defaultdict(set)
        for rank, layout in enumerate(layouts):
            for piece in layout:
                holders[piece.box.name].add(rank)
        self.owners = assign_owners({name: costs[name] for name in holders}, holders, len(layouts))
        """The owner of each matrix: a rank of the group."""
        self._rounds = list(_make_rounds(layouts, shapes, self.owners, dist.get_rank(group)))

    @torch.no_grad()
    def run(self, compute: Callable[[Tensor], Tensor]) -> None:
        """Replace each matrix [rows, columns] by `compute(matrix)`, on its owner. A collective over the group."""
        for matrix_round in self._rounds:
            memory = (
                {_WHOLE: torch.empty(matrix_round.numel, dtype=_DTYPE, device=self._device)}
                if matrix_round.numel
                else {}
            )
            # Ranks without a matrix in this round still send their parts of other ranks' matrices.
            self._copy_pieces(matrix_round.gather, self._storages, memory)
            for first_element, shape in matrix_round.matrices:
                matrix = memory[_WHOLE][first_element : first_element + prod(shape)].view(shape)
                matrix.copy_(compute(matrix))
            self._copy_pieces(matrix_round.scatter, memory, self._storages)

    def _copy_pieces(self, plan: RankPlan, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> None:
        # Shared memory would cost a collective and new files in every round.
        Transport(plan, sources, destinations, dtype=_DTYPE, group=self._group, shared_memory=False).reshard()


def _make_rounds(
    layouts: Sequence[Layout], shapes: Mapping[str, tuple[int, int]], owners: Mapping[str, int], rank: int
) -> Iterator[_Round]:
    """Yield this rank's plans for each round of matrices.

    `layouts` has the pieces on each rank, `owners` the rank that gets a whole matrix.
    """
    pieces_by_name: dict[str, list[list[Piece]]] = {}
    for rank_index, layout in enumerate(layouts):
        for piece in layout:
            pieces_by_name.setdefault(piece.box.name, [[] for _ in layouts])[rank_index].append(piece)
    for names_by_owner in plan_rounds(owners, shapes):
        names = [name for owned_names in names_by_owner.values() for name in owned_names]
        part_layouts = [
            tuple(piece for name in names for piece in pieces_by_name[name][rank_index])
            for rank_index in range(len(layouts))
        ]
        whole_layouts: list[Layout] = [()] * len(layouts)
        # The owner of a matrix stores its matrices one after another in a flat buffer.
        matrices: tuple[tuple[int, tuple[int, ...]], ...] = ()
        for owner, owned_names in names_by_owner.items():
            first_elements = list(accumulate((prod(shapes[name]) for name in owned_names[:-1]), initial=0))
            whole_layouts[owner] = tuple(
                dense_piece(name, shapes[name], _WHOLE, first_element)
                for name, first_element in zip(owned_names, first_elements, strict=True)
            )
            if owner == rank:
                matrices = tuple(
                    (first_element, shapes[name])
                    for name, first_element in zip(owned_names, first_elements, strict=True)
                )
        # Equal layouts give equal plans on all ranks, so no plan is sent.
        gather, scatter = (
            make_plan(sources, destinations, itemsize=_DTYPE.itemsize, bucket_bytes=BUCKET_BYTES).for_rank(rank)
            for sources, destinations in ((part_layouts, whole_layouts), (whole_layouts, part_layouts))
        )
        yield _Round(gather, scatter, matrices)
