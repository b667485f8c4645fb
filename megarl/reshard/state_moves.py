"""Bytes that move when a run continues with other parallel sizes, computed without starting a rank.

After a step, each rank holds a copy of its own training state. It also holds copies of the ranks whose partner it is
(`partners`). First, each leaving rank sends the copies that no staying rank holds to staying ranks (`hand_overs`). Then
each rank of the new layout receives the tensor elements that it needs and lacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Any, NamedTuple

from megarl.config.parallel import ParallelConfig
from megarl.families.names import TensorName
from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.reshard.boxes import Box, Layout, Piece, contiguous_strides, flat_boxes
from megarl.reshard.cost_model import Traffic, count
from megarl.reshard.layouts.megatron import MegatronLayouts, megatron_layouts, parameter_shapes
from megarl.reshard.plan import RankTopology, make_plan

_FLOAT32_BYTES = 4
_ALIGNED_PARAMETER, _ALIGNED_BUCKET = 64, 128
"""Elements by which Megatron-Core 0.16.1 aligns parameters and buckets in a distributed optimizer's buffer."""

_BUCKET_NUMEL, _BUCKET_NUMEL_PER_RANK = 40_000_000, 1_000_000
"""Parameters of a bucket in Megatron-Core 0.16.1: the larger of the first, and the second times the ranks that share
it.
"""

_Ranks = dict[int, list[list[Piece]]]
"""Pieces of each rank, by the bytes of one element."""


def partners(topology: RankTopology) -> list[int]:
    """Return, for each rank, the rank that receives its copies: on the next node, or on one node the next rank.

    `topology` has each rank's node first. No two ranks have the same partner if all nodes have equally many ranks.
    """
    nodes = list(dict.fromkeys(place[0] for place in topology))
    on_node = {node: [rank for rank, place in enumerate(topology) if place[0] == node] for node in nodes}
    if len(nodes) == 1:
        return [(rank + 1) % len(topology) for rank in range(len(topology))]
    found = [0] * len(topology)
    for number, node in enumerate(nodes):
        others = on_node[nodes[(number + 1) % len(nodes)]]
        for place, rank in enumerate(on_node[node]):
            found[rank] = others[place % len(others)]
    return found


def hand_overs(held: Sequence[Iterable[int]], stays: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the copies that only leaving ranks hold: (rank that had the state, sender, receiver).

    `held` lists, for each rank, the ranks whose copies it holds. `stays` are the ranks that stay.
    """
    holders: dict[int, list[int]] = {}
    for rank, origins in enumerate(held):
        for origin in origins:
            holders.setdefault(origin, []).append(rank)
    alone = [origin for origin, ranks in sorted(holders.items()) if not set(ranks) & set(stays)]
    return [(origin, holders[origin][0], stays[number % len(stays)]) for number, origin in enumerate(alone)]


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Settings that decide the layout of a training state.

    `itemsize` is the size of a weight in bytes. With `is_distributed`, data-parallel ranks share the optimizer's state.
    `overlaps_reduction` is the recipe's trainer.overlap_grad_reduce.
    """

    itemsize: int
    is_distributed: bool
    overlaps_reduction: bool | None = None

    @property
    def optimizer_bytes(self) -> int:
        """Return the bytes of the optimizer's state for one parameter: Adam's two moments, and a main weight."""
        # Megatron's optimizer of float32 weights updates them in place, unless it is distributed.
        has_main_weight = self.is_distributed or self.itemsize < _FLOAT32_BYTES
        return (2 + has_main_weight) * _FLOAT32_BYTES


class StateMoves(NamedTuple):
    """Bytes that move when the parallel sizes change, summed over all ranks unless stated otherwise."""

    state: int
    """Bytes of the training state, each element counted once."""
    handed_over: int
    """Bytes that leaving ranks send to staying ranks."""
    received: int
    """Bytes that ranks of the new layout receive from each other."""
    most_received: int
    """Largest number of bytes that one rank receives."""
    minimum: int
    """Bytes that ranks of the new layout need and did not hold before the hand-over: the lower bound."""

    @property
    def ratio(self) -> float:
        """Moved bytes divided by the minimum; 1.0 if nothing has to move."""
        return (self.received + self.handed_over) / self.minimum if self.minimum else 1.0

    def as_json(self) -> dict[str, Any]:
        return {f"{name}_bytes": value for name, value in self._asdict().items()} | {"ratio_to_minimum": self.ratio}


def state_moves(
    model: ModelShape, before: ParallelConfig, after: ParallelConfig, settings: StateSettings, nodes: tuple[int, int]
) -> StateMoves:
    """Count the bytes of a change from the sizes `before` to `after`.

    Rank i of the new sizes has the process of rank i, if it exists. `nodes` are the ranks on a node, before and after.
    """
    old, new = _StateLayouts(model, before, settings, nodes[0]), _StateLayouts(model, after, settings, nodes[1])
    num_old, num_new = before.world_size, after.world_size
    topology = [(rank // nodes[0],) for rank in range(num_old)]
    origins: list[set[int]] = [{rank} for rank in range(num_old)]
    for rank, partner in enumerate(partners(topology)):
        origins[partner].add(rank)
    every_rank = range(max(num_old, num_new))
    first = [origins[rank] if rank < num_old else set() for rank in every_rank]
    moves = hand_overs(origins, range(min(num_old, num_new)))
    then = [{*held, *(origin for origin, _, receiver in moves if receiver == rank)} for rank, held in enumerate(first)]
    wanted = new.wanted()
    handed_over = sum(old.num_bytes(origin) for origin, _, _ in moves)
    received, minimum, most = 0, 0, defaultdict[int, int](int)
    places = [(rank // nodes[1],) for rank in every_rank]
    for size in wanted:
        needs = [tuple(wanted[size][rank]) if rank < num_new else () for rank in every_rank]
        copies = [old.copies(size, held) for held in first]
        # The minimum may come from leaving ranks, too.
        minimum += int(_traffic(copies, needs, size, places).lower_bound.sum())
        copies = [old.copies(size, held) for held in then[:num_new]]
        from_others = _traffic(copies, needs[:num_new], size, places[:num_new]).received[1:].sum(0)
        received += int(from_others.sum())
        for rank, num_bytes in enumerate(from_others.tolist()):
            most[rank] += num_bytes
    state = sum(old.num_bytes(rank) for rank in range(num_old))
    return StateMoves(state, handed_over, received, max(most.values()), minimum)


def _traffic(sources: Sequence[Layout], needs: Sequence[Layout], size: int, places: RankTopology) -> Traffic:
    """Return the bytes that move from the sources, which each rank holds, to the `needs` of each rank."""
    # One huge bucket avoids the work of slicing tensors.
    return count(make_plan(sources, needs, itemsize=size, bucket_bytes=1 << 62, topology=places))


class _StateLayouts:
    """Layout of a training state with given parallel sizes. Each weight is copied by one rank of those that hold it."""

    def __init__(self, model: ModelShape, parallel: ParallelConfig, settings: StateSettings, per_node: int) -> None:
        padded = padded_vocab_size(model.vocab_size, parallel.tp)
        self._layouts = megatron_layouts(model, parallel, padded_vocab_size=padded)
        self._settings, num = settings, parallel.world_size
        self._weights: _Ranks = defaultdict(lambda: [[] for _ in range(num)])
        self._copied: _Ranks = defaultdict(lambda: [[] for _ in range(num)])
        copied_weights: list[list[Piece]] = [[] for _ in range(num)]
        for tensor in self._layouts.tensors:
            size = _FLOAT32_BYTES if tensor.template in self._layouts.float32 else settings.itemsize
            boxes = set[Box]()
            for holding in self._layouts.holdings(tensor):
                piece = holding.piece(tensor)
                for rank in holding.ranks:
                    self._weights[size][rank].append(piece)
                # The last pipeline stage may hold tied embeddings too.
                if piece.box not in boxes:
                    self._copied[size][holding.ranks[0]].append(piece)
                    copied_weights[holding.ranks[0]].append(piece)
                    boxes.add(piece.box)
        if settings.is_distributed:
            kinds = (False, True) if model.num_experts else (False,)
            has_buckets = settings.overlaps_reduction
            if has_buckets is None:
                # The default of the trainer: only where a data-parallel group spans several nodes.
                groups = [_sharers(self._layouts, rank, is_expert) for rank in range(num) for is_expert in kinds]
                has_buckets = any(len({rank // per_node for rank in group}) > 1 for group in groups)
            second, first = _tied(self._layouts)
            self._optimizer = [
                _optimizer_pieces(self._layouts, rank, self._weights_by_parameter(rank), has_buckets, second | first)
                for rank in range(num)
            ]
            self._copied[settings.optimizer_bytes] = [
                [piece for piece in pieces if piece.storage not in second] for pieces in self._optimizer
            ]
        else:
            self._optimizer = [
                [p for pieces in self._weights_by_parameter(rank).values() for p in pieces] for rank in range(num)
            ]
            self._copied[settings.optimizer_bytes] = copied_weights

    def _weights_by_parameter(self, rank: int) -> dict[str, list[Piece]]:
        """Return the pieces of a rank's weights by the name of the parameter."""
        found: dict[str, list[Piece]] = {}
        for by_rank in self._weights.values():
            for piece in by_rank[rank]:
                found.setdefault(piece.storage, []).append(piece)
        return found

    def copies(self, size: int, ranks: Iterable[int]) -> Layout:
        """Return the pieces in the copies of these ranks' states, with elements of `size` bytes."""
        return tuple(piece for rank in sorted(ranks) for piece in self._copied[size][rank])

    def num_bytes(self, rank: int) -> int:
        """Return the size in bytes of the copy of a rank's state."""
        return sum(size * piece.box.numel for size, found in self._copied.items() for piece in found[rank])

    def wanted(self) -> _Ranks:
        """Return the pieces that each rank needs."""
        return {**self._weights, self._settings.optimizer_bytes: self._optimizer}


def _optimizer_pieces(
    layouts: MegatronLayouts,
    rank: int,
    weights: Mapping[str, Sequence[Piece]],
    has_buckets: bool,
    alone: Collection[str],
) -> list[Piece]:
    """Return the pieces of a distributed optimizer's state on a rank. `weights` are its weights' by parameter.

    Parameters in `alone` have a bucket of their own.
    """
    at, found = layouts.parallel.coordinates(rank), list[Piece]()
    sizes = {name: prod(shape) for name, shape in _in_order(parameter_shapes(layouts, at, has_buffers=False))}
    for is_expert in (False, True):
        sharers = _sharers(layouts, rank, is_expert)
        own = {name: size for name, size in sizes.items() if (".experts." in name) == is_expert}
        chunks = dict.fromkeys(name.partition(".")[0] for name in own) if layouts.parallel.vpp > 1 else [""]
        for number, chunk in enumerate(chunks):
            of_chunk = {name: size for name, size in own.items() if not chunk or name.startswith(f"{chunk}.")}
            # Megatron-Core 0.16.1 cuts buckets on the first stage only, and there in the first chunk only.
            cuts = has_buckets and at.pp == number == 0
            bucket = max(_BUCKET_NUMEL, _BUCKET_NUMEL_PER_RANK * len(sharers)) if cuts else None
            shares = _shares(of_chunk, sharers.index(rank), len(sharers), bucket, alone)
            for name, start, stop in shares:
                found += [piece for weight in weights[name] for piece in _cut(weight, start, stop)]
    return found


def _tied(layouts: MegatronLayouts) -> tuple[set[str], set[str]]:
    """Return the names of tied embeddings on the last and on the first stage. Both are empty with one stage."""
    if layouts.parallel.pp == 1:
        return set(), set()
    again = [rule for rule in layouts.rules if rule.place == "last_of_several_stages"]
    templates = {template for rule in again for template, _ in rule.tensors}
    before = [r for r in layouts.rules if r not in again and any(template in templates for template, _ in r.tensors)]
    second, first = (
        {
            layouts.slot(rule, chunk, 0).of(TensorName("", -1, 0))[0]
            for rule in rules
            for chunk in layouts.chunks_of(rule)
        }
        for rules in (again, before)
    )
    return second, first


def _sharers(layouts: MegatronLayouts, rank: int, is_expert: bool) -> Sequence[int]:
    """Return the ranks that hold the same parameters as a rank, and share their optimizer's state."""
    at = layouts.parallel.coordinates(rank)
    return layouts.ranks[is_expert, at.pp, at.ep if is_expert else 0, at.etp if is_expert else at.tp]


def _in_order(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return parameters in the order in which Megatron's model creates them, as far as their names say."""

    def place(item: tuple[str, tuple[int, ...]]) -> tuple[int, int]:
        name = item[0]
        if "embedding." in name:
            return 0, 0
        _, _, inside = name.partition("layers.")
        number = inside.partition(".")[0]
        return (1, int(number)) if number.isdigit() else (2, 0)

    return sorted(shapes.items(), key=place)


def _shares(
    sizes: Mapping[str, int], index: int, num_sharers: int, bucket_numel: int | None, alone: Collection[str]
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, stop) for each range of a parameter that data-parallel rank `index` holds.

    `start` and `stop` are offsets into the flattened parameter; `stop` is exclusive. Megatron places parameters into a
    buffer in reverse order and divides it into buckets. It cuts each bucket into equal parts, one per rank. Parameters
    in `alone` have a bucket of their own: tied embeddings on several stages.
    """
    position = bucket_start = 0
    placed: list[tuple[str, int, int]] = []
    names = list(sizes)[::-1]
    for place, name in enumerate(names):
        start = -(-position // _ALIGNED_PARAMETER) * _ALIGNED_PARAMETER
        position = start + sizes[name]
        placed.append((name, start, position))
        is_full = bucket_numel is not None and position - bucket_start >= bucket_numel
        following = names[place + 1] if place + 1 < len(names) else None
        if not is_full and following is not None and name not in alone and following not in alone:
            continue
        align = lcm(num_sharers, _ALIGNED_BUCKET)
        position = -(-position // align) * align
        share = (position - bucket_start) // num_sharers
        low = bucket_start + index * share
        for other, first, last in placed:
            begin, end = max(low, first), min(low + share, last)
            if begin < end:
                yield other, begin - first, end - first
        placed, bucket_start = [], position


def _cut(weight: Piece, start: int, stop: int) -> Iterator[Piece]:
    """Yield the boxes of a weight's piece within the elements `start` to `stop` of its flat parameter."""
    low, high = max(start, weight.offset), min(stop, weight.offset + weight.box.numel)
    if low >= high:
        return
    for offset, shape in flat_boxes(weight.box.shape, low - weight.offset, high - weight.offset):
        corner = tuple(a + b for a, b in zip(weight.box.start, offset, strict=True))
        box = Box(weight.box.name, corner, tuple(a + n for a, n in zip(corner, shape, strict=True)))
        yield Piece(box, weight.storage, 0, contiguous_strides(shape))
