"""The plan: who copies which elements to whom, in which order, in which buckets. Integers and names, no torch.

Every rank makes the same plan from the same layouts, so no collective is needed but a comparison of digests. For each
destination piece the sources are tried nearest first: this rank, this node, other nodes; among equally near replicas a
destination takes from the one it has taken least from.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from math import prod
from typing import Any, Literal

from megarl.weights.boxes import Box, Layout, Piece, find_overlap, subtract

Link = Literal["local", "same_node", "other_node"]


@dataclass(frozen=True, slots=True)
class View:
    """A strided view into a storage: element (i, j, ...) lies at `offset + i * strides[0] + j * strides[1] + ...`."""

    storage: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy: `shape` elements of tensor `name` from a view on one rank to a view on another (or the same)."""

    source_rank: int
    destination_rank: int
    name: str
    shape: tuple[int, ...]
    source: View
    destination: View

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class RankBucket:
    """One rank's part of a bucket. Sends are grouped by receiving rank and receives by sending rank, both ascending.

    `is_exchanged` says whether any two ranks exchange something in this bucket: then all ranks take part.
    """

    local: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    is_exchanged: bool


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does, bucket by bucket; all ranks have equally many buckets."""

    rank: int
    num_ranks: int
    itemsize: int
    buckets: tuple[RankBucket, ...]

    @property
    def staging_numel(self) -> int:
        """Elements that the largest bucket stages on this rank, sent and received."""
        return max((sum(t.numel for t in (*b.sends, *b.receives)) for b in self.buckets), default=0)


@dataclass(frozen=True)
class Plan:
    """All ranks' transfers in execution order, cut into buckets."""

    nodes: tuple[int, ...]
    itemsize: int
    bucket_bytes: int
    buckets: tuple[tuple[Transfer, ...], ...]

    def for_rank(self, rank: int) -> RankPlan:
        """The part of the plan that one rank carries out."""
        return RankPlan(rank, len(self.nodes), self.itemsize, tuple(bucket[rank] for bucket in self._by_rank))

    @cached_property
    def _by_rank(self) -> list[list[RankBucket]]:
        return [_split_by_rank(bucket, len(self.nodes)) for bucket in self.buckets]

    def digest(self) -> str:
        """A fingerprint: equal on all ranks, or they would not understand each other's messages."""
        return hashlib.sha256(repr((self.nodes, self.itemsize, self.buckets)).encode()).hexdigest()

    def link(self, transfer: Transfer) -> Link:
        """Which kind of wire a transfer uses."""
        if transfer.source_rank == transfer.destination_rank:
            return "local"
        same = self.nodes[transfer.source_rank] == self.nodes[transfer.destination_rank]
        return "same_node" if same else "other_node"

    def statistics(self) -> dict[str, Any]:
        """Bytes by link for the world and per receiving rank, number of copies, messages, buckets and staged bytes."""
        received = [{"local": 0, "same_node": 0, "other_node": 0} for _ in self.nodes]
        messages = 0
        for bucket in self.buckets:
            for transfer in bucket:
                received[transfer.destination_rank][self.link(transfer)] += transfer.numel * self.itemsize
            pairs = {(t.source_rank, t.destination_rank) for t in bucket}
            messages += sum(source != destination for source, destination in pairs)
        return {
            "bytes": {link: sum(r[link] for r in received) for link in ("local", "same_node", "other_node")},
            "received_bytes": received,
            "copies": sum(map(len, self.buckets)),
            "messages": messages,
            "buckets": len(self.buckets),
            "staging_bytes": [self.for_rank(r).staging_numel * self.itemsize for r in range(len(self.nodes))],
        }


def make_plan(
    sources: Sequence[Layout],
    destinations: Sequence[Layout],
    *,
    itemsize: int,
    bucket_bytes: int,
    nodes: Sequence[int] | None = None,
) -> Plan:
    """Join source with destination layouts, both by rank (an empty layout where a rank plays no part).

    `itemsize` is the size of an element on the wire, `bucket_bytes` bounds what one rank stages at once, sent and
    received together; `nodes` is the node of each rank (left out: one node). Raises ValueError with the tensor's name
    if a destination element has no source, or is described twice.
    """
    if len(sources) != len(destinations):
        raise ValueError(f"{len(sources)} source layouts, {len(destinations)} destination layouts")
    nodes = tuple(nodes or [0] * len(sources))
    for rank, layout in enumerate(destinations):
        if overlap := find_overlap(layout):
            raise ValueError(
                f"rank {rank}: {overlap[0]} and {overlap[1]} are the same elements of {overlap[0].storage}"
            )
    holders = _index(sources)
    by_tensor: dict[str, list[Transfer]] = defaultdict(list)
    for rank, layout in enumerate(destinations):
        for transfer in _fetch(rank, layout, holders, nodes):
            by_tensor[transfer.name].append(transfer)
    limit = max(bucket_bytes // itemsize, 1)
    buckets = _cut_into_buckets((by_tensor[name] for name in sorted(by_tensor, key=_reading_order)), limit, len(nodes))
    return Plan(nodes, itemsize, bucket_bytes, tuple(tuple(_merge_series(bucket)) for bucket in buckets))


def lower_bound_bytes(sources: Sequence[Layout], destinations: Sequence[Layout], itemsize: int) -> list[int]:
    """The least each rank must receive: its destination elements minus those its own source holds."""
    bounds: list[int] = []
    for own, wanted in zip(sources, destinations, strict=True):
        held: dict[str, list[Box]] = defaultdict(list)
        for piece in own:
            held[piece.box.name].append(piece.box)
        missing = 0
        for piece in wanted:
            holes = [piece.box]
            for box in held[piece.box.name]:
                parts = [(hole, hole.intersect(box)) for hole in holes]
                holes = [rest for hole, part in parts for rest in (subtract(hole, part) if part else [hole])]
            missing += sum(hole.numel for hole in holes)
        bounds.append(missing * itemsize)
    return bounds


_Holders = dict[str, dict[Box, dict[int, Piece]]]
"""Tensor name -> distinct box -> the ranks that hold it, and where."""


def _index(sources: Sequence[Layout]) -> _Holders:
    holders: _Holders = defaultdict(dict)
    for rank, layout in enumerate(sources):
        for piece in layout:
            holders[piece.box.name].setdefault(piece.box, {}).setdefault(rank, piece)
    return holders


def _fetch(rank: int, layout: Layout, holders: _Holders, nodes: tuple[int, ...]) -> Iterator[Transfer]:
    """Cover each of a rank's destination pieces with the nearest source pieces, each element once."""
    taken: dict[int, int] = defaultdict(int)

    def distance(source: int) -> int:
        return 0 if source == rank else 1 if nodes[source] == nodes[rank] else 2

    for piece in layout:
        missing = [piece.box]
        candidates = (
            (box, where) for box, where in holders.get(piece.box.name, {}).items() if box.intersect(piece.box)
        )
        for box, where in sorted(candidates, key=lambda c: (min(map(distance, c[1])), c[0])):
            rest: list[Box] = []
            for hole in missing:
                part = hole.intersect(box)
                if part is None:
                    rest.append(hole)
                    continue
                source = min(where, key=lambda r: (distance(r), taken[r], (r - rank) % len(nodes)))
                taken[source] += part.numel
                there, here = where[source].narrow(part), piece.narrow(part)
                yield Transfer(source, rank, part.name, part.shape, _view(there), _view(here))
                rest += subtract(hole, part)
            missing = rest
        if missing:
            raise ValueError(f"no source holds {missing[0].name} from {missing[0].start} to {missing[0].stop}")


def _view(piece: Piece) -> View:
    return View(piece.storage, piece.offset, piece.strides)


@cache
def _reading_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts layer 2 before layer 10."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name))


def _cut_into_buckets(tensors: Iterable[list[Transfer]], limit: int, num_ranks: int) -> Iterator[list[Transfer]]:
    """Fill buckets tensor by tensor, so that no rank stages more than `limit` elements in one."""
    bucket: list[Transfer] = []
    staged = [0] * num_ranks
    for transfers in tensors:
        for unit in _split_to_fit(transfers, limit, num_ranks):
            load = _staged(unit, num_ranks)
            if bucket and any(a + b > limit for a, b in zip(staged, load, strict=True)):
                yield bucket
                bucket, staged = [], [0] * num_ranks
            bucket += unit
            staged = [a + b for a, b in zip(staged, load, strict=True)]
    if bucket:
        yield bucket


def _staged(transfers: Iterable[Transfer], num_ranks: int) -> list[int]:
    staged = [0] * num_ranks
    for transfer in transfers:
        if transfer.source_rank != transfer.destination_rank:
            staged[transfer.source_rank] += transfer.numel
            staged[transfer.destination_rank] += transfer.numel
    return staged


def _split_to_fit(transfers: list[Transfer], limit: int, num_ranks: int) -> list[list[Transfer]]:
    """Cut one tensor's remote transfers along their first dimension until each slice fits a bucket or is one row."""
    num_slices = -(-max(_staged(transfers, num_ranks), default=0) // limit)
    longest = max((t.shape[0] for t in transfers if t.shape), default=1)
    while num_slices > 1:
        num_slices = min(num_slices, longest)
        slices: list[list[Transfer]] = [[] for _ in range(num_slices)]
        for transfer in transfers:
            for index, part in _slices(transfer, num_slices):
                slices[index].append(part)
        if num_slices == longest or all(max(_staged(unit, num_ranks)) <= limit for unit in slices):
            return slices
        num_slices += 1
    return [transfers]


def _slices(transfer: Transfer, num_slices: int) -> Iterator[tuple[int, Transfer]]:
    if transfer.source_rank == transfer.destination_rank or not transfer.shape:
        yield 0, transfer
        return
    rows = transfer.shape[0]
    for index in range(num_slices):
        start, stop = rows * index // num_slices, rows * (index + 1) // num_slices
        if start < stop:
            yield (
                index,
                replace(
                    transfer,
                    shape=(stop - start, *transfer.shape[1:]),
                    source=_advanced(transfer.source, start),
                    destination=_advanced(transfer.destination, start),
                ),
            )


def _advanced(view: View, rows: int) -> View:
    return replace(view, offset=view.offset + rows * view.strides[0])


def _merge_series(transfers: list[Transfer]) -> list[Transfer]:
    """Replace equal copies at constant steps by one copy with one more dimension (the groups of a fused projection)."""

    def kind(t: Transfer) -> tuple[Any, ...]:
        views = (t.source.storage, t.source.strides, t.destination.storage, t.destination.strides)
        return (_reading_order(t.name), t.source_rank, t.destination_rank, t.shape, *views)

    def place(t: Transfer) -> tuple[int, int]:
        return t.destination.offset, t.source.offset

    merged: list[Transfer] = []
    for _, group in groupby(sorted(transfers, key=lambda t: (kind(t), place(t))), key=kind):
        run: list[Transfer] = []
        for transfer in group:
            # A view cannot step backwards, so a descending series stays apart.
            if run and (
                _step(run[-1], transfer)[0] < 0 or (len(run) > 1 and _step(run[-1], transfer) != _step(*run[:2]))
            ):
                merged.append(_stacked(run))
                run = []
            run.append(transfer)
        merged.append(_stacked(run))
    return merged if len(merged) == len(transfers) else _merge_series(merged)


def _step(a: Transfer, b: Transfer) -> tuple[int, int]:
    return b.source.offset - a.source.offset, b.destination.offset - a.destination.offset


def _stacked(run: list[Transfer]) -> Transfer:
    if len(run) == 1:
        return run[0]
    first = run[0]
    source_step, destination_step = _step(first, run[1])
    return replace(
        first,
        shape=(len(run), *first.shape),
        source=replace(first.source, strides=(source_step, *first.source.strides)),
        destination=replace(first.destination, strides=(destination_step, *first.destination.strides)),
    )


def _split_by_rank(bucket: tuple[Transfer, ...], num_ranks: int) -> list[RankBucket]:
    local: list[list[Transfer]] = [[] for _ in range(num_ranks)]
    sends: list[list[Transfer]] = [[] for _ in range(num_ranks)]
    receives: list[list[Transfer]] = [[] for _ in range(num_ranks)]
    for transfer in bucket:
        if transfer.source_rank == transfer.destination_rank:
            local[transfer.source_rank].append(transfer)
        else:
            sends[transfer.source_rank].append(transfer)
            receives[transfer.destination_rank].append(transfer)
    return [
        RankBucket(
            tuple(local[rank]),
            tuple(sorted(sends[rank], key=lambda t: t.destination_rank)),
            tuple(sorted(receives[rank], key=lambda t: t.source_rank)),
            any(sends),
        )
        for rank in range(num_ranks)
    ]
