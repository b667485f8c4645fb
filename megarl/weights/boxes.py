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
        if len(self.start) != len(self.stop) or any(a >= b or a < 0 for a, b in zip(self.start, self.stop, strict=True)):
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
        return Piece(box, self.storage, self.offset + sum(n * s for n, s in zip(steps, self.strides, strict=True)), self.strides)


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
