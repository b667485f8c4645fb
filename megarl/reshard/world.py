"""Layouts of all ranks, stored once per kind of tensor instead of once per rank.

Tensors of one kind differ only in layer and expert number: the same ranks store them in the same way. Planning by kind
costs no more than one rank's own pieces, for any number of ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from megarl.families.tensors.names import TensorName, in_order, parse_name
from megarl.reshard.boxes import Box, Layout, Piece


class StoragePattern(NamedTuple):
    """Name of the storages of one kind of tensor, with `{layer}` and `{expert}` counted from the rank's first."""

    storage: str
    first_layer: int = 0
    first_expert: int = 0
    expert_step: int = 0
    """Elements from one expert to the next if the storage stacks experts; else 0."""

    def find_storage(self, tensor: TensorName) -> tuple[str, int]:
        """Return the storage that holds a tensor, and the element at which the tensor's expert starts there."""
        expert = tensor.expert - self.first_expert
        return self.storage.format(layer=tensor.layer - self.first_layer, expert=expert), expert * self.expert_step


class Holding(NamedTuple):
    """A part of a tensor (indices `start` to `stop`), and the ranks (ascending) that store it at the same place."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    ranks: Sequence[int]
    storage: StoragePattern
    offset: int
    strides: tuple[int, ...]

    def piece(self, tensor: TensorName) -> Piece:
        storage, shift = self.storage.find_storage(tensor)
        return Piece(Box(tensor.name, self.start, self.stop), storage, self.offset + shift, self.strides)


class Layouts(Sequence[Layout]):
    """Layouts of all ranks, a sequence by rank. A rank's layout is created when it is read.

    `holdings` has the stored parts of a tensor. `Plan.digest` hashes the `repr`: equal layouts must have equal texts,
    and different layouts different texts.
    """

    @cached_property
    def tensors(self) -> Sequence[TensorName]:
        """All tensors stored by some rank, sorted by layer, name and expert."""
        raise NotImplementedError

    @cached_property
    def float32(self) -> frozenset[str]:
        """Tensor templates (names without layer and expert) that these ranks store in float32, in any model."""
        return frozenset()

    @abstractmethod
    def holdings(self, tensor: TensorName) -> tuple[Holding, ...]:
        """Return the stored parts of a tensor, with their ranks. All tensors of a kind share one object."""

    # `Sequence` also declares slices; no caller takes a slice of all ranks' layouts.
    def __getitem__(self, rank: int) -> Layout:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        return tuple(
            holding.piece(tensor)
            for tensor in self.tensors
            for holding in self.holdings(tensor)
            if rank in holding.ranks
        )


class PlacedLayouts(Layouts):
    """Layouts of consecutive ranks, starting at rank `first_rank` of `num_ranks`. All other ranks store nothing."""

    def __init__(self, layouts: Layouts, first_rank: int, num_ranks: int) -> None:
        assert first_rank + len(layouts) <= num_ranks, (
            f"{len(layouts)} ranks from rank {first_rank} on exceed {num_ranks} ranks"
        )
        self._layouts, self._first_rank, self._num_ranks = layouts, first_rank, num_ranks
        self._shifted_holdings: dict[int, tuple[tuple[Holding, ...], tuple[Holding, ...]]] = {}
        """(original, shifted) by the id of the original: the tensors of a kind share one object, also after the shift.
        The entry keeps the original alive, so that its id is not reused.
        """

    @cached_property
    def tensors(self) -> Sequence[TensorName]:
        return self._layouts.tensors

    @cached_property
    def float32(self) -> frozenset[str]:
        return self._layouts.float32

    def __len__(self) -> int:
        return self._num_ranks

    def __repr__(self) -> str:
        return f"{self._layouts!r} from rank {self._first_rank} of {self._num_ranks}"

    def holdings(self, tensor: TensorName) -> tuple[Holding, ...]:
        # The layouts count ranks from their own first one. Here their first rank is `_first_rank`.
        holdings = self._layouts.holdings(tensor)
        if id(holdings) not in self._shifted_holdings:
            shifted = tuple(
                holding._replace(ranks=_shift_ranks(holding.ranks, self._first_rank)) for holding in holdings
            )
            self._shifted_holdings[id(holdings)] = holdings, shifted
        return self._shifted_holdings[id(holdings)][1]


def _shift_ranks(ranks: Sequence[int], distance: int) -> Sequence[int]:
    if isinstance(ranks, range):
        return range(ranks.start + distance, ranks.stop + distance, ranks.step)
    return tuple(rank + distance for rank in ranks)


class ListedLayouts(Layouts):
    """Layouts made of lists of pieces, recorded from a live model or read from files."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        """Group equal pieces of all ranks into holdings, by tensor."""
        self._num_ranks = len(layouts)
        ranks_by_piece: dict[Piece, list[int]] = {}
        for rank, layout in enumerate(layouts):
            for piece in layout:
                ranks_by_piece.setdefault(piece, []).append(rank)
        self._holdings: dict[TensorName, tuple[Holding, ...]] = {}
        for piece, ranks in ranks_by_piece.items():
            box = piece.box
            holding = Holding(
                box.start, box.stop, tuple(ranks), StoragePattern(piece.storage), piece.offset, piece.strides
            )
            tensor = parse_name(box.name)
            self._holdings[tensor] = (*self._holdings.get(tensor, ()), holding)

    @cached_property
    def tensors(self) -> Sequence[TensorName]:
        return in_order(self._holdings)

    def __len__(self) -> int:
        return self._num_ranks

    def __repr__(self) -> str:
        return repr([(tensor, self._holdings[tensor]) for tensor in self.tensors])

    def holdings(self, tensor: TensorName) -> tuple[Holding, ...]:
        return self._holdings.get(tensor, ())
