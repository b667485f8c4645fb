"""Boxes and pieces: index ranges of Hugging Face tensors, and their places in a rank's memory or a file.

Integers and names without torch, so that any machine can compute, intersect and check layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from megarl.rounding import divide_up


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Index range of the Hugging Face tensor `name`, `stop` excluded. Raises ValueError for an empty range."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(
            first >= end or first < 0 for first, end in zip(self.start, self.stop, strict=True)
        ):
            raise ValueError(f"box of {self.name}: start {self.start} and stop {self.stop} enclose no elements")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """A box (index range of a Hugging Face tensor), and where its elements lie in memory or in a file.

    `storage` names a local parameter or a file. Element (i, j, ...) of the box lies at `offset + i * strides[0] + j *
    strides[1] + ...`. Offset and strides count elements.
    """

    box: Box
    storage: str
    offset: int
    strides: tuple[int, ...]


Layout = tuple[Piece, ...]
"""All pieces of one rank."""


def contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def dense_piece(name: str, shape: tuple[int, ...], storage: str, offset: int) -> Piece:
    """Return the piece of a whole contiguous tensor from element `offset` on."""
    return Piece(Box(name, (0,) * len(shape), shape), storage, offset, contiguous_strides(shape))


def with_prefix(layout: Layout, *, box_prefix: str = "", storage_prefix: str = "") -> Layout:
    """Return the layout with the prefix `box_prefix` before each tensor name, and `storage_prefix` before each storage
    name.
    """
    return tuple(
        replace(piece, box=replace(piece.box, name=box_prefix + piece.box.name), storage=storage_prefix + piece.storage)
        for piece in layout
    )


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, shape) of the boxes that cover elements `start` to `stop` of a row-major tensor, in order.

    Shape (3, 4), elements 2 to 8: box (1, 2) at (0, 2), then box (1, 4) at (1, 0).
    """
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row_numel = prod(shape[1:])
    first_row, end_row = divide_up(start, by=row_numel), stop // row_numel
    # Whole rows are rows `first_row` to `end_row`. Without any, the elements are a part of one row. Otherwise yield the
    # end of the row before, the whole rows, and the beginning of the row after.
    if first_row > end_row:
        yield from _boxes_in_row(shape, end_row, start, stop)
        return
    if start < first_row * row_numel:
        yield from _boxes_in_row(shape, first_row - 1, start, first_row * row_numel)
    if first_row < end_row:
        yield (first_row, *(0,) * (len(shape) - 1)), (end_row - first_row, *shape[1:])
    if end_row * row_numel < stop:
        yield from _boxes_in_row(shape, end_row, end_row * row_numel, stop)


def cut_piece(piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """Yield the parts of a piece that lie between elements `start` and `stop` of its storage.

    Raises ValueError for a piece with gaps between its elements in the storage.
    """
    shape = piece.box.shape
    if piece.strides != contiguous_strides(shape):
        raise ValueError(f"{piece.box.name}: its elements in {piece.storage} do not follow each other")
    first_element, end_element = max(start, piece.offset), min(stop, piece.offset + piece.box.numel)
    if first_element >= end_element:
        return
    offset = first_element
    for box_offset, box_shape in flat_boxes(shape, first_element - piece.offset, end_element - piece.offset):
        box_start = tuple(first + shift for first, shift in zip(piece.box.start, box_offset, strict=True))
        box_stop = tuple(first + size for first, size in zip(box_start, box_shape, strict=True))
        yield Piece(Box(piece.box.name, box_start, box_stop), piece.storage, offset, piece.strides)
        offset += prod(box_shape)


def _boxes_in_row(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, shape) of the boxes that cover elements `start` to `stop` of row `index`."""
    elements_before = index * prod(shape[1:])
    for offset, box in flat_boxes(shape[1:], start - elements_before, stop - elements_before):
        yield (index, *offset), (1, *box)
