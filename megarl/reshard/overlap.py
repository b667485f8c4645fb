"""Overlap of source and destination layouts: all copies of one kind of tensor, before source ranks are chosen.

Tensors of a kind are stored by the same ranks in the same way, so one overlap serves them all. The plan then adds
ranks, layers and experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, product
from math import prod
from typing import Any, NamedTuple

from megarl.families.tensors.names import TensorName
from megarl.reshard.boxes import Box
from megarl.reshard.world import Holding, StoragePattern
from megarl.rounding import divide_up


class CopyTemplate(NamedTuple):
    """A copy of `shape` elements between strided views of two storages, without layer and expert numbers."""

    shape: tuple[int, ...]
    source: StoragePattern
    source_offset: int
    source_strides: tuple[int, ...]
    destination: StoragePattern
    destination_offset: int
    destination_strides: tuple[int, ...]


class Region(NamedTuple):
    """A part of a tensor that a destination needs. Each entry of `sources` is a stored box that contains the part."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    sources: tuple[Holding, ...]
    destination: Holding

    @property
    def numel(self) -> int:
        return prod(b - a for a, b in zip(self.start, self.stop, strict=True))

    def largest_slice_numel(self, num_slices: int) -> int:
        """Return the elements of the largest slice if the part is cut into `num_slices` along its first dimension."""
        rows = self.stop[0] - self.start[0]
        return self.numel // rows * divide_up(rows, by=num_slices)


@dataclass(slots=True)
class Flow:
    """All parts of a tensor with the same source ranks (`holders`) and destination ranks (`takers`), both ascending.

    A destination rank receives all these parts from one source rank. `templates` is the cache of `copy_templates`.
    """

    holders: Sequence[int]
    takers: Sequence[int]
    regions: list[Region] = field(default_factory=list)
    templates: dict[tuple[int, ...], list[list[CopyTemplate]]] = field(default_factory=dict)

    def copy_templates(self, source: int, num_slices: int) -> list[list[CopyTemplate]]:
        """Return the copies from rank `source` to any destination rank, by slice. Copies at equal distances are
        merged.
        """
        # Ranks that hold the same box need the same copies, so the cache key has the box's number for each region.
        box_numbers = tuple(
            next(box_number for box_number, holding in enumerate(region.sources) if source in holding.ranks)
            for region in self.regions
        )
        key = (num_slices, *box_numbers)
        if key not in self.templates:
            slices: list[list[CopyTemplate]] = [[] for _ in range(num_slices)]
            for region, box_number in zip(self.regions, box_numbers, strict=True):
                whole_copy = _copy_template(region, region.sources[box_number])
                for index, copy_template in _cut_slices(whole_copy, num_slices):
                    slices[index].append(copy_template)
            self.templates[key] = [merge_series(copy_templates) for copy_templates in slices]
        return self.templates[key]


class Overlap:
    """All flows from source to destination ranks for one kind of tensor. `tensor` is an example of the kind.

    If several ranks store the same part, it is one source with all these ranks. Overlapping parts are split first.
    Raises ValueError if an element has no source.
    """

    def __init__(self, tensor: TensorName, sources: Sequence[Holding], destinations: Sequence[Holding]) -> None:
        """Divide each destination part into regions by the source ranks that have them."""
        flows: dict[tuple[Sequence[int], Sequence[int]], Flow] = {}
        cells = [
            (start, stop, cell_sources, tuple(sorted({rank for holding in cell_sources for rank in holding.ranks})))
            for start, stop, cell_sources in _disjoint_cells(sources)
        ]
        for destination in destinations:
            num_missing = Box(tensor.name, destination.start, destination.stop).numel
            for start, stop, cell_sources, holders in cells:
                overlap_start, overlap_stop = (
                    tuple(map(max, start, destination.start)),
                    tuple(map(min, stop, destination.stop)),
                )
                if all(a < b for a, b in zip(overlap_start, overlap_stop, strict=True)):
                    region = Region(overlap_start, overlap_stop, cell_sources, destination)
                    flows.setdefault((holders, destination.ranks), Flow(holders, destination.ranks)).regions.append(
                        region
                    )
                    num_missing -= region.numel
            if num_missing:
                raise ValueError(
                    f"the source layouts have no elements for a part of {tensor.name} between the indices "
                    f"{destination.start} and {destination.stop}"
                )
        self.flows = tuple(flows.values())
        self.cells = tuple((prod(b - a for a, b in zip(*cell[:2], strict=True)), cell[3]) for cell in cells)
        """(number of elements, source ranks) of each disjoint part of the tensor."""
        self.num_rotations = max((len(flow.holders) for flow in self.flows), default=1)
        """Number of tensors until the rotating choice among equal source ranks repeats."""
        self.longest = max((r.stop[0] - r.start[0] for flow in self.flows for r in flow.regions), default=1)
        """Maximum number of slices: the rows of the longest part."""

    def flows_of_rank(self, rank: int) -> tuple[tuple[int, Flow], ...]:
        """Return (index, flow) for the flows that a rank sends or receives."""
        return tuple(
            (index, flow) for index, flow in enumerate(self.flows) if rank in flow.takers or rank in flow.holders
        )


def merge_series(copy_templates: list[CopyTemplate]) -> list[CopyTemplate]:
    """Merge equal copies at equal distances into one copy with one more dimension, as for a fused projection.

    One large copy needs fewer kernel launches. Merged copies are merged again until nothing changes.
    """
    if len(copy_templates) < 2:
        return copy_templates

    def merge_key(template: CopyTemplate) -> tuple[Any, ...]:
        """Return all but the offsets. Only copies of the same kind can be merged."""
        return (
            template.source,
            template.source_strides,
            template.destination,
            template.destination_strides,
            template.shape,
        )

    merged: list[CopyTemplate] = []
    for _, equal_copies in groupby(
        sorted(
            copy_templates,
            key=lambda template: (merge_key(template), template.destination_offset, template.source_offset),
        ),
        key=merge_key,
    ):
        series: list[CopyTemplate] = []
        for copy_template in equal_copies:
            # torch's strides cannot be negative, so a descending series stays unmerged.
            if series and (
                _index_step(series[-1], copy_template)[0] < 0
                or (len(series) > 1 and _index_step(series[-1], copy_template) != _index_step(*series[:2]))
            ):
                merged.append(_stack_series(series))
                series = []
            series.append(copy_template)
        merged.append(_stack_series(series))
    return merged if len(merged) == len(copy_templates) else merge_series(merged)


def _index_step(a: CopyTemplate, b: CopyTemplate) -> tuple[int, int]:
    return b.source_offset - a.source_offset, b.destination_offset - a.destination_offset


def _stack_series(series: list[CopyTemplate]) -> CopyTemplate:
    """Merge equal copies at equal distances into one copy. Its new first dimension numbers them."""
    if len(series) == 1:
        return series[0]
    first_copy = series[0]
    source_step, destination_step = _index_step(first_copy, series[1])
    return first_copy._replace(
        shape=(len(series), *first_copy.shape),
        source_strides=(source_step, *first_copy.source_strides),
        destination_strides=(destination_step, *first_copy.destination_strides),
    )


def _copy_template(region: Region, source: Holding) -> CopyTemplate:
    """Return the copy of a region (the common box of both) from `source` to the region's destination."""

    def offset(holding: Holding) -> int:
        """Return the place of the region's first element in the storage of a holding."""
        dims = zip(region.start, holding.start, holding.strides, strict=True)
        return holding.offset + sum(
            (region_first - holding_first) * stride for region_first, holding_first, stride in dims
        )

    shape = tuple(stop - start for start, stop in zip(region.start, region.stop, strict=True))
    destination = region.destination
    return CopyTemplate(
        shape,
        source.storage,
        offset(source),
        source.strides,
        destination.storage,
        offset(destination),
        destination.strides,
    )


def _cut_slices(copy_template: CopyTemplate, num_slices: int) -> Iterator[tuple[int, CopyTemplate]]:
    """Cut a copy along its first dimension into equal slices. Yields (index, slice) of each non-empty slice."""
    if num_slices == 1:
        yield 0, copy_template
        return
    rows = copy_template.shape[0]
    for index in range(num_slices):
        start, stop = rows * index // num_slices, rows * (index + 1) // num_slices
        if start < stop:
            yield (
                index,
                copy_template._replace(
                    shape=(stop - start, *copy_template.shape[1:]),
                    source_offset=copy_template.source_offset + start * copy_template.source_strides[0],
                    destination_offset=copy_template.destination_offset + start * copy_template.destination_strides[0],
                ),
            )


_Cell = tuple[tuple[int, ...], tuple[int, ...], tuple[Holding, ...]]


def _disjoint_cells(holdings: Sequence[Holding]) -> list[_Cell]:
    """Cut the stored parts of a tensor into disjoint boxes. Return each box with the stored parts that contain it."""
    corners = [corner for holding in holdings for corner in (holding.start, holding.stop)]
    # Cut at every edge of every holding: each cell then lies wholly inside or outside each holding.
    cuts = [sorted(set(edges)) for edges in zip(*corners, strict=True)]
    cells = []
    for ranges in product(*map(pairwise, cuts)):
        start, stop = tuple(low for low, _ in ranges), tuple(high for _, high in ranges)
        containers = tuple(
            holding
            for holding in holdings
            if all(stored_first <= cell_first for stored_first, cell_first in zip(holding.start, start, strict=True))
            and all(stored_end >= cell_end for stored_end, cell_end in zip(holding.stop, stop, strict=True))
        )
        if containers:
            cells.append((start, stop, containers))
    return cells
