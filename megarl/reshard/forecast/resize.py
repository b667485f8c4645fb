"""Bytes that move when a run continues with other parallel sizes, computed without starting a rank.

Leaving nodes first send copies to staying nodes that lack them (`state_holders`). Then each rank of the new sizes
receives the elements that its node lacks. The counts are approximate: Megatron's distributed optimizer cuts one buffer
of all parameters into equal parts; this module cuts each tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.reshard.boxes import Box, Layout, Piece, contiguous_strides, flat_boxes
from megarl.reshard.forecast.cost_model import Traffic, measure_traffic
from megarl.reshard.layouts.megatron import MegatronLayouts, megatron_layouts
from megarl.reshard.plan import RankTopology, make_plan
from megarl.reshard.state_holders import hand_overs, partners

_FLOAT32_BYTES = 4

_Ranks = dict[int, list[list[Piece]]]
"""Pieces of all ranks, [rank][piece], by the bytes of an element: 2 for bfloat16, 4 for float32."""


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Settings that decide the layout of a training state.

    `itemsize`: bytes of a weight. `is_distributed`: data-parallel ranks shard the optimizer's state.
    """

    itemsize: int
    is_distributed: bool

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state for one parameter: Adam's two moments, and a main weight."""
        # Megatron's optimizer of float32 weights updates them in place, unless it is distributed.
        has_main_weight = self.is_distributed or self.itemsize < _FLOAT32_BYTES
        return (2 + has_main_weight) * _FLOAT32_BYTES


class ResizeBytes(NamedTuple):
    """Bytes that move when the parallel sizes change, by default summed over all ranks."""

    state: int
    """Bytes of the training state, each element counted once."""
    handed_over: int
    """Bytes that leaving nodes send to staying nodes."""
    received: int
    """Bytes that ranks of the new sizes receive from each other."""
    most_received: int
    """Largest number of bytes that one rank receives."""
    minimum: int
    """Lower bound: bytes that ranks of the new sizes need and their own node lacks."""

    @property
    def ratio(self) -> float:
        """Moved bytes divided by their minimum; 1.0 if nothing has to move."""
        return (self.received + self.handed_over) / self.minimum if self.minimum else 1.0

    def as_json(self) -> dict[str, Any]:
        sizes = {f"{name}_bytes": value for name, value in self._asdict().items()}
        return sizes | {"ratio_to_minimum": self.ratio, "approximate": True}


def forecast_resize(
    model: ModelShape, before: ParallelConfig, after: ParallelConfig, settings: StateSettings, nodes: tuple[int, int]
) -> ResizeBytes:
    """Count the bytes that move for a change from the sizes `before` to `after`.

    The ranks fill the nodes in order. `nodes`: ranks per node, before and after.
    """
    old_state, new_state = _StateLayouts(model, before, settings), _StateLayouts(model, after, settings)
    old_topology = [(rank // nodes[0],) for rank in range(before.world_size)]
    holders = {
        rank: {old_topology[rank][0], old_topology[partner][0]} for rank, partner in enumerate(partners(old_topology))
    }
    new_topology = [(rank // nodes[1],) for rank in range(after.world_size)]
    receivers_by_origin = hand_overs(holders, list(dict.fromkeys(node for (node,) in new_topology)))
    handed_over_bytes = sum(old_state.num_bytes(origin) for origin in receivers_by_origin)
    local_origins = [
        {origin for origin, holder_nodes in holders.items() if node in holder_nodes} for (node,) in new_topology
    ]
    readable_origins = [
        origins | {origin for origin, receiver in receivers_by_origin.items() if receiver == node}
        for origins, (node,) in zip(local_origins, new_topology, strict=True)
    ]
    # The minimum also counts copies on leaving nodes. Represent each of these copies by one more rank.
    nearest_origins = [*local_origins, *({origin} for origin in receivers_by_origin)]
    nearest_topology = [*new_topology, *(old_topology[origin] for origin in receivers_by_origin)]
    received_bytes, least_bytes, bytes_by_rank = 0, 0, defaultdict[int, int](int)
    for element_bytes, pieces_by_rank in new_state.needed.items():
        needed_layouts = [tuple(pieces) for pieces in pieces_by_rank]
        copied_layouts = [old_state.copies(element_bytes, origins) for origins in nearest_origins]
        least_bytes += int(
            _count_traffic(
                copied_layouts, [*needed_layouts, *(() for _ in receivers_by_origin)], element_bytes, nearest_topology
            ).lower_bound.sum()
        )
        copied_layouts = [old_state.copies(element_bytes, origins) for origins in readable_origins]
        bytes_from_others = (
            _count_traffic(copied_layouts, needed_layouts, element_bytes, new_topology).received[1:].sum(0)
        )
        received_bytes += int(bytes_from_others.sum())
        for rank, num_bytes in enumerate(bytes_from_others.tolist()):
            bytes_by_rank[rank] += num_bytes
    state_bytes = sum(old_state.num_bytes(rank) for rank in range(before.world_size))
    return ResizeBytes(state_bytes, handed_over_bytes, received_bytes, max(bytes_by_rank.values()), least_bytes)


def _count_traffic(
    sources: Sequence[Layout], destinations: Sequence[Layout], element_bytes: int, topology: RankTopology
) -> Traffic:
    # One huge bucket avoids the work of slicing tensors.
    return measure_traffic(
        make_plan(sources, destinations, itemsize=element_bytes, bucket_bytes=1 << 62, topology=topology)
    )


class _StateLayouts:
    """Layouts of a training state with certain parallel sizes. If ranks have the same weight, one of them copies it."""

    def __init__(self, model: ModelShape, parallel: ParallelConfig, settings: StateSettings) -> None:
        """List each rank's needed and copied pieces, by bytes per element."""
        num_ranks = parallel.world_size
        self.needed: _Ranks = defaultdict(lambda: [[] for _ in range(num_ranks)])
        """Pieces needed by each rank."""
        self._copied: _Ranks = defaultdict(lambda: [[] for _ in range(num_ranks)])
        padded_vocabulary = padded_vocab_size(model.vocab_size, parallel.tp)
        layouts = megatron_layouts(model, parallel, padded_vocab_size=padded_vocabulary)
        for tensor in layouts.tensors:
            element_bytes = _FLOAT32_BYTES if tensor.template in layouts.float32 else settings.itemsize
            boxes_before = set[Box]()
            for holding in layouts.holdings(tensor):
                piece = holding.piece(tensor)
                # A box may be stored twice: tied embeddings are on the first and the last pipeline stage.
                is_first_copy = piece.box not in boxes_before
                boxes_before.add(piece.box)
                if is_first_copy:
                    self._copied[element_bytes][holding.ranks[0]].append(piece)
                for rank in holding.ranks:
                    self.needed[element_bytes][rank].append(piece)
                    sharers = (
                        _list_sharers(layouts, rank, ".experts." in piece.storage)
                        if settings.is_distributed
                        else [rank]
                    )
                    optimizer_share = list(_cut_share(piece, sharers.index(rank), len(sharers)))
                    self.needed[settings.optimizer_bytes][rank] += optimizer_share
                    if is_first_copy and (settings.is_distributed or rank == holding.ranks[0]):
                        self._copied[settings.optimizer_bytes][rank] += optimizer_share

    def copies(self, size: int, ranks: Iterable[int]) -> Layout:
        """Return the layout of the state copies that these ranks made, for tensors with `size` bytes per element."""
        return tuple(piece for rank in sorted(ranks) for piece in self._copied[size][rank])

    def num_bytes(self, rank: int) -> int:
        return sum(size * piece.box.numel for size, pieces in self._copied.items() for piece in pieces[rank])


def _list_sharers(layouts: MegatronLayouts, rank: int, is_expert: bool) -> Sequence[int]:
    """Return the ranks that share the optimizer's state of `rank`'s parameters."""
    coordinates = layouts.parallel.coordinates(rank)
    return layouts.ranks[
        is_expert, coordinates.pp, coordinates.ep if is_expert else 0, coordinates.etp if is_expert else coordinates.tp
    ]


def _cut_share(piece: Piece, index: int, num_sharers: int) -> Iterator[Piece]:
    """Yield the boxes of part `index` of a piece cut into `num_sharers` equal parts."""
    start, stop = (piece.box.numel * share_index // num_sharers for share_index in (index, index + 1))
    if start == stop:
        return
    for offset, shape in flat_boxes(piece.box.shape, start, stop):
        corner = tuple(first + shift for first, shift in zip(piece.box.start, offset, strict=True))
        box = Box(piece.box.name, corner, tuple(first + size for first, size in zip(corner, shape, strict=True)))
        yield Piece(box, piece.storage, 0, contiguous_strides(shape))
