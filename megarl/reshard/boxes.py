"""Boxes and pieces: index ranges of Hugging Face tensors, and their places in a rank's memory or a file.

Integers and names without torch, so that any machine can compute, intersect and check layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Index range of the Hugging Face tensor `name`, `stop` excluded. Raises ValueError for an empty range."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(
            a >= b or a < 0 for a, b in zip(self.start, self.stop, strict=True)
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
    """A box (index range of a Hugging Face tensor) and the place of its elements in memory or in a file.

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
    """Return the row-major strides of a contiguous tensor, in elements."""
    sizes = tuple(shape)
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def dense_piece(name: str, shape: tuple[int, ...], storage: str, offset: int) -> Piece:
    """Return the piece of a whole tensor stored contiguously from element `offset` on."""
    return Piece(Box(name, (0,) * len(shape), shape), storage, offset, contiguous_strides(shape))


def with_prefix(layout: Layout, *, box: str = "", storage: str = "") -> Layout:
    """Return the layout with the prefix `box` before each tensor name, and `storage` before each storage name."""
    return tuple(
        replace(piece, box=replace(piece.box, name=box + piece.box.name), storage=storage + piece.storage)
        for piece in layout
    )


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, shape) of the boxes that cover elements `start` to `stop` of a row-major tensor, in order.

    Shape (3, 4), elements 2 to 8: box (1, 2) at (0, 2), then box (1, 4) at (1, 0).
    """
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    # Either a part of one row, or: the end of a row, whole rows, and the beginning of a row.
    if first > last:
        yield from _boxes_in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _boxes_in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _boxes_in_row(shape, last, last * row, stop)


def cut_piece(piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """Yield the parts of a piece in the elements `start` to `stop` of its storage.

    Raises ValueError for a piece with gaps between its elements in the storage.
    """
    shape = piece.box.shape
    if piece.strides != contiguous_strides(shape):
        raise ValueError(f"{piece.box.name}: its elements in {piece.storage} do not follow each other")
    low, high = max(start, piece.offset), min(stop, piece.offset + piece.box.numel)
    if low >= high:
        return
    offset = low
    for corner, size in flat_boxes(shape, low - piece.offset, high - piece.offset):
        begin = tuple(a + b for a, b in zip(piece.box.start, corner, strict=True))
        end = tuple(a + n for a, n in zip(begin, size, strict=True))
        yield Piece(Box(piece.box.name, begin, end), piece.storage, offset, piece.strides)
        offset += prod(size)


def _boxes_in_row(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, shape) of the boxes that cover elements `start` to `stop` of row `index`."""
    before = index * prod(shape[1:])
    for offset, box in flat_boxes(shape[1:], start - before, stop - before):
        yield (index, *offset), (1, *box)
