"""The layouts of all ranks of a world, said once per kind of tensor instead of once per rank.

A model of many layers and experts repeats itself: tensors of one kind are held alike by the same ranks, only their
numbers differ. A plan made over kinds costs what one rank's own pieces cost, however many ranks there are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from megarl.families.names import TensorName, in_order, parse_name
from megarl.reshard.boxes import Box, Layout, Piece


class StorageSlot(NamedTuple):
    """A storage for each tensor of a kind: numbers in its name count from the first that the rank holds."""

    storage: str
    first_layer: int = 0
    first_expert: int = 0
    expert_step: int = 0
    """Elements from one expert to the next where a storage stacks them."""

    def of(self, tensor: TensorName) -> tuple[str, int]:
        """The storage of a tensor and what it adds to an offset."""
        expert = tensor.expert - self.first_expert
        return self.storage.format(layer=tensor.layer - self.first_layer, expert=expert), expert * self.expert_step


class Holding(NamedTuple):
    """Indices `start` to `stop` of a tensor and the ranks (ascending) that hold them at the same place of their own."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    ranks: Sequence[int]
    slot: StorageSlot
    offset: int
    strides: tuple[int, ...]

    def piece(self, tensor: TensorName) -> Piece:
        storage, shift = self.slot.of(tensor)
        return Piece(Box(tensor.name, self.start, self.stop), storage, self.offset + shift, self.strides)


class Layouts(Sequence[Layout]):
    """All ranks' layouts: a sequence by rank, each made when asked for, and the holdings by tensor.

    Layouts with equal texts (`repr`) are equal.
    """

    @cached_property
    def tensors(self) -> Sequence[TensorName]:
        """Every tensor that some rank holds, by layer, template and expert."""
        raise NotImplementedError

    @abstractmethod
    def holdings(self, tensor: TensorName) -> tuple[Holding, ...]:
        """Who holds which part of a tensor: the same object for all tensors of a kind."""

    # Nobody takes a slice of all ranks' layouts.
    def __getitem__(self, rank: int) -> Layout:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        return tuple(
            holding.piece(tensor)
            for tensor in self.tensors
            for holding in self.holdings(tensor)
            if rank in holding.ranks
        )


class ListedLayouts(Layouts):
    """Layouts given piece by piece, as they were recorded or read."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._num_ranks = len(layouts)
        by_piece: dict[Piece, list[int]] = {}
        for rank, layout in enumerate(layouts):
            for piece in layout:
                by_piece.setdefault(piece, []).append(rank)
        self._holdings: dict[TensorName, tuple[Holding, ...]] = {}
        for piece, ranks in by_piece.items():
            box = piece.box
            holding = Holding(
                box.start, box.stop, tuple(ranks), StorageSlot(piece.storage), piece.offset, piece.strides
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
