"""Plan of a reshard: the copies between ranks, in order and by bucket (exchange). No torch.

A plan is a function of the source and destination layouts. Each rank computes its own part; the parts fit together. The
source of a piece is the nearest rank with the piece: the rank itself, else a rank on its node, under its switch, or
anywhere. Destinations are spread evenly over equally near sources, which rotate from tensor to tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.families.tensors.names import TensorName
from megarl.reshard.boxes import Layout
from megarl.reshard.overlap import CopyTemplate, Overlap
from megarl.reshard.world import Layouts, ListedLayouts
from megarl.rounding import divide_up

RankTopology = Sequence[Sequence[int | str]]
"""Per rank: its node, then the network switches above the node, nearest first. All lists are equally long."""


class View(NamedTuple):
    """Strided view of a storage: element (i, j, ...) is at `offset + i * strides[0] + j * strides[1] + ...`."""

    storage: str
    offset: int
    strides: tuple[int, ...]


class Transfer(NamedTuple):
    """One copy of `shape` elements of tensor `name` between two views, on different ranks or on one rank.

    An element takes `width` items of the plan's item size.
    """

    source_rank: int
    destination_rank: int
    name: str
    shape: tuple[int, ...]
    source: View
    destination: View
    width: int = 1

    @property
    def numel(self) -> int:
        """Size of the copy in items of the plan's item size."""
        return prod(self.shape) * self.width


@dataclass(frozen=True, slots=True)
class RankBucket:
    """One rank's part of a bucket: the copies made in one exchange.

    Sends are sorted by receiving rank, receives by sending rank. `is_exchanged`: some ranks exchange data in this
    bucket, so all ranks take part.
    """

    local: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    is_exchanged: bool


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's copies by bucket (exchange). All ranks have the same number of buckets."""

    rank: int
    num_ranks: int
    itemsize: int
    buckets: tuple[RankBucket, ...]

    @property
    def staging_numel(self) -> int:
        return max((sum(t.numel for t in (*b.sends, *b.receives)) for b in self.buckets), default=0)


_FLOAT32_BYTES = 4

_Copies = tuple[CopyTemplate, list[tuple[int, int]]]
"""A copy without rank numbers, and the pairs (source rank, destination rank) that make it."""

NO_LOADS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
"""Loads of a tensor that no rank sends."""


class _Loads(NamedTuple):
    """Elements that each rank sends and receives for each slice of a tensor: int64 [ranks], or `NO_LOADS`."""

    of_slice: NDArray[np.int64]
    num_slices: int
    is_exchanged: bool


class Step(NamedTuple):
    """The copies of one tensor: slice i is in `buckets[i]`; `rotation` rotates the choice among equal source ranks."""

    tensor: TensorName
    overlap: Overlap
    rotation: int
    buckets: tuple[int, ...]


class Plan:
    """All copies from source to destination layouts in execution order, divided into buckets (exchanges).

    `make_plan` creates it.
    """

    def __init__(
        self,
        sources: Layouts,
        destinations: Layouts,
        *,
        itemsize: int,
        bucket_bytes: int,
        topology: RankTopology,
        bounds_local: bool = False,
    ) -> None:
        """Plan steps and buckets. `bounds_local`: copies within a rank also count for a bucket's size."""
        self.sources, self.destinations, self._bounds_local = sources, destinations, bounds_local
        self.itemsize, self.bucket_bytes = itemsize, bucket_bytes
        self._link_groups = _number_link_groups(topology)
        self.steps: list[Step] = []
        self.exchanged: list[bool] = []
        self._source_ranks: dict[tuple[Sequence[int], Sequence[int], int], NDArray[np.int64]] = {}
        self._make_steps(max(bucket_bytes // itemsize, 1))

    @property
    def num_ranks(self) -> int:
        return self._link_groups.shape[1]

    def width(self, tensor: TensorName) -> int:
        """Return how many items one element of a tensor takes. An item has the plan's `itemsize` bytes.

        It is above 1 for float32 tensors in a bfloat16 plan: they are sent unrounded.
        """
        return max(1, _FLOAT32_BYTES // self.itemsize) if tensor.template in self.sources.float32 else 1

    @property
    def nodes(self) -> NDArray[np.int64]:
        """The node number of each rank: int64 [ranks]."""
        return self._link_groups[0]

    def for_rank(self, rank: int) -> RankPlan:
        """Return one rank's part of the plan. The time grows with this rank's pieces, not with the number of ranks."""
        transfers: list[tuple[list[Transfer], list[Transfer], list[Transfer]]] = [([], [], []) for _ in self.exchanged]
        list_copies = cache(partial(self._list_copies, rank))
        for tensor, overlap, rotation, buckets in self.steps:
            if not (slices := list_copies(overlap, rotation, len(buckets))):
                continue
            name, width = tensor.name, self.width(tensor)
            for bucket, copies in zip(buckets, slices, strict=True):
                local, sends, receives = transfers[bucket]
                for template, rank_pairs in copies:
                    source_storage, source_shift = template.source.find_storage(tensor)
                    destination_storage, destination_shift = template.destination.find_storage(tensor)
                    source_view = View(source_storage, template.source_offset + source_shift, template.source_strides)
                    destination_view = View(
                        destination_storage,
                        template.destination_offset + destination_shift,
                        template.destination_strides,
                    )
                    for source, taker in rank_pairs:
                        transfer = Transfer(source, taker, name, template.shape, source_view, destination_view, width)
                        (local if source == taker else sends if source == rank else receives).append(transfer)
        # Peers must agree on the order of elements in a message. Sorting is stable, so both have the order of the
        # steps.
        buckets = tuple(
            RankBucket(
                tuple(local),
                tuple(sorted(sends, key=lambda t: t.destination_rank)),
                tuple(sorted(receives, key=lambda t: t.source_rank)),
                exchanged,
            )
            for (local, sends, receives), exchanged in zip(transfers, self.exchanged, strict=True)
        )
        return RankPlan(rank, self.num_ranks, self.itemsize, buckets)

    def digest(self) -> str:
        """Return a hash of the plan's inputs and bucket boundaries. Equal digests on all ranks prove equal plans."""
        digest = hashlib.sha256(
            repr((self._link_groups.tolist(), self.itemsize, self.bucket_bytes, len(self.steps))).encode()
        )
        digest.update(repr([step.buckets for step in self.steps]).encode())
        digest.update(f"{self.sources!r} -> {self.destinations!r}".encode())
        return digest.hexdigest()

    def choose_sources(self, holders: Sequence[int], takers: Sequence[int], rotation: int) -> NDArray[np.int64]:
        """Return the source rank of each destination rank: int64 [takers]."""
        cache_key = (holders, takers, rotation)
        if cache_key not in self._source_ranks:
            holder_ranks, taker_ranks = np.asarray(holders), np.asarray(takers)
            rotated_positions, source_ranks = (
                np.arange(len(taker_ranks)) + rotation,
                np.where(np.isin(taker_ranks, holder_ranks), taker_ranks, -1),
            )
            for group_of_rank in self._link_groups:
                # From the nearest link to the farthest. A taker keeps the first source found (-1: none yet).
                holder_order = np.argsort(group_of_rank[holder_ranks], kind="stable")
                first_holder, end_holder = (
                    np.searchsorted(group_of_rank[holder_ranks[holder_order]], group_of_rank[taker_ranks], side)
                    for side in ("left", "right")
                )
                # `first_holder` to `end_holder` are the holders at this distance. The taker's position, shifted by the
                # rotation, selects one of them, so that takers spread over the holders.
                holder_index = first_holder + rotated_positions % np.maximum(end_holder - first_holder, 1)
                source_ranks = np.where(
                    (source_ranks < 0) & (end_holder > first_holder),
                    holder_ranks[holder_order[holder_index % len(holder_ranks)]],
                    source_ranks,
                )
            self._source_ranks[cache_key] = source_ranks
        return self._source_ranks[cache_key]

    def _list_copies(self, rank: int, overlap: Overlap, rotation: int, num_slices: int) -> list[list[_Copies]]:
        """Return the copies that a rank makes of one tensor, one for each slice. Empty: it makes none."""
        slices: list[list[_Copies]] = [[] for _ in range(num_slices)]
        for index, flow in overlap.flows_of_rank(rank):
            takers, sources = np.asarray(flow.takers), self.choose_sources(flow.holders, flow.takers, rotation + index)
            pairs: dict[int, list[tuple[int, int]]] = {}
            is_on_rank = (takers == rank) | (sources == rank)
            for source, taker in zip(sources[is_on_rank].tolist(), takers[is_on_rank].tolist(), strict=True):
                pairs.setdefault(source, []).append((source, taker))
            for source, source_pairs in pairs.items():
                for slice_copies, copy_templates in zip(slices, flow.copy_templates(source, num_slices), strict=True):
                    slice_copies += [(copy_template, source_pairs) for copy_template in copy_templates]
        return slices if any(slices) else []

    def _make_steps(self, limit: int) -> None:
        """Distribute the tensors over buckets. In a bucket, sends plus receives of a rank are at most `limit` elements.

        The first tensor of each group of source ranks comes first, then the second of each group, and so on. Thus all
        ranks send at the same time, not one pipeline stage or expert rank after another.
        """
        # Fill the buckets round by round. A new bucket opens when some rank would stage too many items.
        staged_items = np.zeros(self.num_ranks, dtype=np.int64)
        for round_tensors in self._list_rounds(limit):
            buckets: list[list[int]] = [[] for _ in round_tensors]
            # In a group of tensors, slice i of each tensor comes before slice i + 1 of any tensor. Thus all holders
            # fill a bucket together.
            for slice_index in range(max(loads.num_slices for _, _, loads in round_tensors)):
                for (_, _, loads), tensor_buckets in zip(round_tensors, buckets, strict=True):
                    if slice_index < loads.num_slices:
                        if not self.exchanged or (
                            loads.of_slice is not NO_LOADS and (staged_items + loads.of_slice).max() > limit
                        ):
                            self.exchanged.append(False)
                            staged_items = np.zeros(self.num_ranks, dtype=np.int64)
                        if loads.of_slice is not NO_LOADS:
                            staged_items += loads.of_slice
                        self.exchanged[-1] |= loads.is_exchanged
                        tensor_buckets.append(len(self.exchanged) - 1)
            for (tensor, overlap, _), tensor_buckets in zip(round_tensors, buckets, strict=True):
                rotation = (max(tensor.layer, 0) + tensor.expert) % overlap.num_rotations
                self.steps.append(Step(tensor, overlap, rotation, tuple(tensor_buckets)))

    def _list_rounds(self, limit: int) -> Iterator[list[tuple[TensorName, Overlap, _Loads]]]:
        """Yield the tensors of each round and template: round n has the n-th tensor of each group of source ranks."""
        tensors_by_round: dict[tuple[int, str], list[tuple[TensorName, Overlap, _Loads]]] = {}
        overlaps: dict[tuple[int, int], tuple[Overlap, _Loads]] = {}
        newest_rounds: dict[int, int] = {}
        for tensor in self.destinations.tensors:
            source_holdings, destination_holdings = self.sources.holdings(tensor), self.destinations.holdings(tensor)
            # All tensors of a kind share one object of holdings, so its id identifies the kind.
            kind_key = (id(source_holdings), id(destination_holdings))
            if kind_key not in overlaps:
                overlap = Overlap(tensor, source_holdings, destination_holdings)
                overlaps[kind_key] = overlap, self._plan_slices(overlap, limit, self.width(tensor))
            round_number = newest_rounds[id(source_holdings)] = newest_rounds.get(id(source_holdings), -1) + 1
            tensors_by_round.setdefault((round_number, tensor.template), []).append((tensor, *overlaps[kind_key]))
        for _, round_tensors in sorted(tensors_by_round.items(), key=lambda item: item[0]):
            yield round_tensors

    def _plan_slices(self, overlap: Overlap, limit: int, width: int) -> _Loads:
        """Return upper bounds of the items that each rank stages per slice of a tensor, and the number of slices.

        An element takes `width` items.
        """
        max_takers = [self._max_takers(flow.holders, flow.takers) for flow in overlap.flows]
        if not any(max_takers) and not self._bounds_local:
            return _Loads(NO_LOADS, 1, is_exchanged=False)
        num_slices = 1
        while True:
            items_per_rank = np.zeros(self.num_ranks, dtype=np.int64)
            for flow, num_takers in zip(overlap.flows, max_takers, strict=True):
                if num_takers or self._bounds_local:
                    numel = width * sum(region.largest_slice_numel(num_slices) for region in flow.regions)
                    items_per_rank[np.asarray(flow.holders)] += num_takers * numel
                    items_per_rank[np.asarray(flow.takers)] += numel
            largest_load = int(items_per_rank.max())
            # A slice of at most half a bucket leaves space for slices of other tensors.
            if largest_load * 2 <= limit or num_slices >= overlap.longest:
                return _Loads(items_per_rank, num_slices, is_exchanged=any(max_takers))
            # Jump to the number of slices that equal slices would need. Uneven slices need another round.
            num_slices = min(max(num_slices + 1, divide_up(2 * largest_load * num_slices, by=limit)), overlap.longest)

    def _max_takers(self, holders: Sequence[int], takers: Sequence[int]) -> int:
        """Return the maximum number of destination ranks of one source rank over all rotations. 0: all copies are
        local.
        """
        taker_ranks, source_ranks = np.asarray(takers), self.choose_sources(holders, takers, 0)
        max_takers, is_farther = 0, source_ranks != taker_ranks
        # A rotation shifts the choices among holders at the same distance. The maxima of all distances may meet on one
        # holder, so add them.
        for link_groups in self._link_groups:
            is_near = is_farther & (link_groups[source_ranks] == link_groups[taker_ranks])
            max_takers += int(np.bincount(source_ranks[is_near]).max()) if is_near.any() else 0
            is_farther &= ~is_near
        return max_takers


def _number_link_groups(topology: RankTopology) -> NDArray[np.int64]:
    """Return a group number for each rank and kind of link, nearest kind first: int64 [link kinds, ranks].

    Two ranks have the same number if a link of this kind joins them.
    """
    rows = []
    for level in range(len(topology[0]) + 1):
        group_numbers: dict[tuple[int | str, ...], int] = {}
        rows.append([group_numbers.setdefault(tuple(position[level:]), len(group_numbers)) for position in topology])
    return np.asarray(rows, dtype=np.int64)


def make_plan(
    sources: Sequence[Layout],
    destinations: Sequence[Layout],
    *,
    itemsize: int,
    bucket_bytes: int,
    topology: RankTopology | None = None,
    bounds_local: bool = False,
) -> Plan:
    """Return the plan from source to destination layouts, both listed by rank (empty for a rank without tensors).

    `itemsize`: bytes of a sent element. `bucket_bytes` limits the bytes that a rank stages at once, sends plus
    receives. `topology` defaults to one node. With `bounds_local`, copies within a rank count towards the limit too.
    Raises ValueError naming the tensor if a destination element has no source.
    """
    if len(sources) != len(destinations):
        raise ValueError(f"{len(sources)} source layouts were given, but {len(destinations)} destination layouts")
    return Plan(
        sources if isinstance(sources, Layouts) else ListedLayouts(sources),
        destinations if isinstance(destinations, Layouts) else ListedLayouts(destinations),
        itemsize=itemsize,
        bucket_bytes=bucket_bytes,
        topology=[(0,)] * len(sources) if topology is None else topology,
        bounds_local=bounds_local,
    )
