"""The layouts of all ranks of a world, said once per kind of tensor instead of once per rank.

A model of many layers and experts repeats itself: tensors of one kind are held alike by the same ranks, only their
numbers differ. A plan made over kinds costs what one rank's own pieces cost, however many ranks there are.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from megarl.weights.boxes import Box, Layout, Piece


class Tensor(NamedTuple):
    """The name of a checkpoint's tensor, its numbers apart: layer -1 and expert 0 where it has none."""

    template: str
    layer: int = -1
    expert: int = 0

    @property
    def name(self) -> str:
        return self.template.format(layer=self.layer, expert=self.expert)


@cache
def parse_name(name: str) -> Tensor:
    """The tensor of a name: the first number after `layers.` and after `experts.` are its layer and expert."""
    if "{" in name or "}" in name:
        return Tensor(name.replace("{", "{{").replace("}", "}}"))
    layer, expert = re.search(r"(?<=\blayers\.)\d+", name), re.search(r"(?<=\bexperts\.)\d+", name)
    template = name
    for found, field in ((expert, "{expert}"), (layer, "{layer}")):
        if found and str(int(found[0])) == found[0]:
            template = template[: found.start()] + field + template[found.end() :]
    return Tensor(
        template,
        int(layer[0]) if layer and "{layer}" in template else -1,
        int(expert[0]) if expert and "{expert}" in template else 0,
    )


class Place(NamedTuple):
    """A storage for each tensor of a kind: numbers in its name count from the first that the rank holds."""

    storage: str
    first_layer: int = 0
    first_expert: int = 0
    expert_step: int = 0
    """Elements from one expert to the next where a storage stacks them."""

    def of(self, tensor: Tensor) -> tuple[str, int]:
        """The storage of a tensor and what it adds to an offset."""
        expert = tensor.expert - self.first_expert
        return self.storage.format(layer=tensor.layer - self.first_layer, expert=expert), expert * self.expert_step


class Holding(NamedTuple):
    """Indices `start` to `stop` of a tensor and the ranks (ascending) that hold them at the same place of their own."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    ranks: Sequence[int]
    place: Place
    offset: int
    strides: tuple[int, ...]

    def piece(self, tensor: Tensor) -> Piece:
        storage, shift = self.place.of(tensor)
        return Piece(Box(tensor.name, self.start, self.stop), storage, self.offset + shift, self.strides)


class Layouts(Sequence[Layout]):
    """All ranks' layouts: a sequence by rank, each made when asked for, and the holdings by tensor."""

    num_ranks: int

    @property
    @abstractmethod
    def tensors(self) -> Sequence[Tensor]:
        """Every tensor that some rank holds, by layer, template and expert."""

    @abstractmethod
    def holdings(self, tensor: Tensor) -> tuple[Holding, ...]:
        """Who holds which part of a tensor: the same object for all tensors of a kind."""

    @abstractmethod
    def describe(self) -> str:
        """All that the layouts are made from: equal texts mean equal layouts."""

    def __len__(self) -> int:
        return self.num_ranks

    def __getitem__(self, rank: int) -> Layout:  # type: ignore[override]
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
        self.num_ranks = len(layouts)
        # Replicas may share one object: each is read once.
        holders: dict[int, tuple[Layout, list[int]]] = {}
        for rank, layout in enumerate(layouts):
            holders.setdefault(id(layout), (layout, []))[1].append(rank)
        by_piece: dict[Piece, list[int]] = {}
        for layout, ranks in holders.values():
            for piece in layout:
                by_piece.setdefault(piece, []).extend(ranks)
        self._holdings: dict[Tensor, tuple[Holding, ...]] = {}
        for piece, ranks in by_piece.items():
            box, place = piece.box, Place(piece.storage.replace("{", "{{").replace("}", "}}"))
            holding = Holding(box.start, box.stop, tuple(sorted(ranks)), place, piece.offset, piece.strides)
            tensor = parse_name(box.name)
            self._holdings[tensor] = (*self._holdings.get(tensor, ()), holding)
        self._tensors = in_order(self._holdings)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self._tensors

    def holdings(self, tensor: Tensor) -> tuple[Holding, ...]:
        return self._holdings.get(tensor, ())

    def describe(self) -> str:
        return repr([(tensor, self._holdings[tensor]) for tensor in self._tensors])


def listed(layouts: Sequence[Layout]) -> Layouts:
    """The layouts themselves if they know their holdings, else a `ListedLayouts` of them."""
    return layouts if isinstance(layouts, Layouts) else ListedLayouts(layouts)


def in_order(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Tensors by layer, template and expert: the order in which a plan moves them."""
    return tuple(sorted(tensors, key=attrgetter("layer", "template", "expert")))
