"""Boxes and pieces: which part of which Hugging Face tensor lies where in whose storage.

Integers and names only, no torch: a layout can be computed, intersected and proved on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A half-open index range of one tensor, named as in the Hugging Face checkpoint files."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(
            a >= b or a < 0 for a, b in zip(self.start, self.stop, strict=True)
        ):
            raise ValueError(f"box of {self.name}: start {self.start} and stop {self.stop} enclose nothing")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        count = 1
        for a, b in zip(self.start, self.stop, strict=True):
            count *= b - a
        return count

    def intersect(self, other: Box) -> Box | None:
        """The elements both boxes hold, or None."""
        if self.name != other.name:
            return None
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(self.name, start, stop)


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """A box and where its elements lie in a local storage.

    `storage` names a local parameter (or file); element (i, j, ...) of the box lies at
    `offset + i * strides[0] + j * strides[1] + ...`, in elements from the parameter's first element.
    """

    box: Box
    storage: str
    offset: int
    strides: tuple[int, ...]

    def narrow(self, box: Box) -> Piece:
        """The part of this piece that holds `box`, which must lie inside it."""
        steps = (a - b for a, b in zip(box.start, self.box.start, strict=True))
        return Piece(
            box, self.storage, self.offset + sum(n * s for n, s in zip(steps, self.strides, strict=True)), self.strides
        )


Layout = tuple[Piece, ...]
"""All pieces of one rank."""


def contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """Row-major strides of a dense tensor of this shape, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def subtract(whole: Box, part: Box) -> list[Box]:
    """What is left of `whole` without `part`, which must lie inside it: at most two boxes per dimension."""
    rest: list[Box] = []
    start, stop = list(whole.start), list(whole.stop)
    for dim, (low, high) in enumerate(zip(part.start, part.stop, strict=True)):
        if start[dim] < low:
            rest.append(Box(whole.name, tuple(start), (*stop[:dim], low, *stop[dim + 1 :])))
        if high < stop[dim]:
            rest.append(Box(whole.name, (*start[:dim], high, *start[dim + 1 :]), tuple(stop)))
        start[dim], stop[dim] = low, high
    return rest


def find_overlap(pieces: Iterable[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces that lie on the same element of one storage, or None.

    Pieces of one storage must share their strides to be told apart where their address ranges cross; if not, they count
    as overlapping.
    """
    open_pieces: list[tuple[int, Piece]] = []
    for piece in sorted(pieces, key=lambda p: (p.storage, p.offset)):
        open_pieces = [(end, p) for end, p in open_pieces if p.storage == piece.storage and end > piece.offset]
        for _, other in open_pieces:
            if other.strides != piece.strides or _grid(other).intersect(_grid(piece)):
                return other, piece
        extent = sum((n - 1) * s for n, s in zip(piece.box.shape, piece.strides, strict=True))
        open_pieces.append((piece.offset + extent + 1, piece))
    return None


def _grid(piece: Piece) -> Box:
    """Where the piece lies in the grid of its storage, by dividing its offset by its strides."""
    corner = [0] * len(piece.strides)
    rest = piece.offset
    for dim in sorted(range(len(corner)), key=lambda d: -piece.strides[d]):
        corner[dim], rest = divmod(rest, piece.strides[dim])
    return Box("", tuple(corner), tuple(a + n for a, n in zip(corner, piece.box.shape, strict=True)))
