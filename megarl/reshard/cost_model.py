"""The cost model of a plan, before any rank is started: bytes per link, copies, messages, memory, time on a GPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config.parallel import RANK_ORDERS, ParallelConfig
from megarl.families import hf_tensors
from megarl.families.shape import ModelShape
from megarl.reshard.layouts.placed import reshard_ends
from megarl.reshard.overlap import Overlap
from megarl.reshard.plan import Plan, make_plan


class Speeds(NamedTuple):
    """Bandwidths of a GPU in bytes per second."""

    nvlink: float
    """NVLink, each direction."""
    infiniband: float
    """Network, each direction."""
    memory: float
    """Device memory, reads and writes together."""


SPEEDS = {
    # Device copies on an H200 were measured at 4.3 of the data sheet's 4.8 TB/s. The others: the same share of theirs.
    "h100": Speeds(450e9, 50e9, 3.0e12),
    "h200": Speeds(450e9, 50e9, 4.3e12),
    "b200": Speeds(900e9, 50e9, 7.2e12),
}
"""By kind of GPU. Source: NVIDIA's data sheets of the SXM modules, and ConnectX-7 at 400 Gb/s for each GPU."""

TIERS = ("local", "same_node", "other_node")

_Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Traffic:
    """Bytes of a plan. Shapes: `received` and `sent` [tier, rank] in the order of TIERS, the other arrays [rank]."""

    received: _Bytes
    sent: _Bytes
    lower_bound: _Bytes
    """The least that each rank must receive: the part of its engine shard that its trainer shard lacks."""
    gathered: _Bytes
    """Received by each rank if full tensors were gathered first."""
    copies: _Bytes
    """Strided copies of each rank: local ones, packing and unpacking."""
    messages: int
    """Pairs of ranks that exchange something, summed over buckets."""
    buckets: int
    staging: _Bytes
    """The staging memory of each rank: its largest bucket."""
    wire_seconds: float
    """Time of the exchanges at the bandwidths of NVLink and InfiniBand, each bucket as long as its busiest rank."""
    speeds: Speeds

    @property
    def ratio(self) -> float:
        """Bytes received from other ranks over their lower bound."""
        least = int(self.lower_bound.sum())
        return int(self.received[1:].sum()) / least if least else 1.0

    def summary(self) -> dict[str, Any]:
        """JSON values: means, maxima and sums over the ranks."""

        def over_ranks(values: _Bytes) -> dict[str, float]:
            return {"mean": float(values.mean()), "max": int(values.max())}

        # The busiest rank reads and writes what it copies, packs and unpacks.
        moved_bytes = float(2 * (self.received.sum(0) + self.sent[1:].sum(0)).max())
        memory_seconds = moved_bytes / self.speeds.memory
        return {
            "received_bytes": {tier: over_ranks(row) for tier, row in zip(TIERS, self.received, strict=True)},
            "sent_bytes": {tier: over_ranks(row) for tier, row in zip(TIERS[1:], self.sent[1:], strict=True)},
            "lower_bound_bytes": over_ranks(self.lower_bound),
            "ratio_to_lower_bound": self.ratio,
            "gathered_bytes": {tier: over_ranks(row) for tier, row in zip(TIERS[1:], self.gathered[1:], strict=True)},
            "copies": over_ranks(self.copies),
            "messages": self.messages,
            "buckets": self.buckets,
            "staging_bytes": over_ranks(self.staging),
            "wire_seconds": self.wire_seconds,
            "memory_seconds": memory_seconds,
            # Copies run while the next bucket travels: the slower of the two decides. Launches are not counted.
            "seconds": max(self.wire_seconds, memory_seconds),
            "gathered_seconds": _wire_seconds(self.gathered, self.speeds),
        }


def forecast(
    model: ModelShape,
    parallel: ParallelConfig,
    *,
    ranks_per_node: int,
    engine_ranks_per_node: int | None = None,
    itemsize: int,
    bucket_bytes: int,
    gpu: str = "h200",
) -> dict[str, Any]:
    """JSON values: the cost of the live reshard and of other rank orders, and the assumed bandwidths.

    `engine_ranks_per_node`: as of `reshard_plan`. `gpu` is a key of SPEEDS.
    """
    speeds = SPEEDS[gpu]
    planned = partial(
        reshard_plan,
        model,
        ranks_per_node=ranks_per_node,
        engine_ranks_per_node=engine_ranks_per_node,
        itemsize=itemsize,
        bucket_bytes=bucket_bytes,
    )
    started = time.process_time()
    plan = planned(parallel)
    plan.for_rank(parallel.num_ranks // 2)
    plan_seconds = time.process_time() - started
    return {
        "layout": dataclasses.asdict(parallel),
        "num_ranks": parallel.num_ranks,
        "ranks_per_node": ranks_per_node,
        "model_bytes": sum(map(prod, hf_tensors(model).values())) * itemsize,
        "plan_seconds": plan_seconds,
        "reshard": count(plan, speeds).summary(),
        "rank_orders": {
            name: count(planned(layout), speeds).summary() for name, layout in rank_orders(model, parallel)
        },
        "gpu": gpu,
        "bytes_per_second": speeds._asdict(),
    }


def count(plan: Plan, speeds: Speeds = SPEEDS["h200"]) -> Traffic:
    """The traffic of a plan over all its ranks, counted once per kind of tensor."""
    num = plan.num_ranks
    received, sent = np.zeros((3, num), np.int64), np.zeros((3, num), np.int64)
    lower_bound, gathered, copies = np.zeros(num, np.int64), np.zeros((3, num), np.int64), np.zeros(num, np.int64)
    in_bucket = np.zeros((len(plan.exchanged), 4, num), np.float32)
    pairs: list[list[NDArray[np.int64]]] = [[] for _ in plan.exchanged]
    turn_of = cache(partial(_turn, plan))
    missing_of, gathered_of = (cache(partial(f, plan)) for f in (_lower_bound, _gathered))
    for _, overlap, turn, buckets in plan.steps:
        one = turn_of(overlap, turn, len(buckets))
        received += one.received
        sent += one.sent
        copies += one.copies
        lower_bound += missing_of(overlap)
        gathered += gathered_of(overlap)
        for bucket in buckets:
            in_bucket[bucket, :2] += one.received[1:] / len(buckets)
            in_bucket[bucket, 2:] += one.sent[1:] / len(buckets)
            pairs[bucket].append(one.pairs)
    size = plan.itemsize
    return Traffic(
        received=received * size,
        sent=sent * size,
        lower_bound=lower_bound * size,
        gathered=gathered * size,
        copies=copies,
        messages=sum(_count_distinct(codes, num) for codes in pairs),
        buckets=len(plan.exchanged),
        staging=np.ceil(in_bucket.sum(1).max(0)).astype(np.int64) * size,
        wire_seconds=sum(_wire_seconds(size * np.maximum(b[:2], b[2:])[[0, 0, 1]], speeds) for b in in_bucket),
        speeds=speeds,
    )


def reshard_plan(
    model: ModelShape,
    parallel: ParallelConfig,
    *,
    ranks_per_node: int,
    engine_ranks_per_node: int | None = None,
    itemsize: int,
    bucket_bytes: int,
) -> Plan:
    """The plan of the live reshard from the model's shape: Megatron's layouts to vLLM's, both computed.

    `engine_ranks_per_node` is given where separate engines have nodes of their own kind.
    """
    ends = reshard_ends(model, parallel, parallel.num_ranks)
    return make_plan(
        ends.sources,
        ends.destinations,
        itemsize=itemsize,
        bucket_bytes=bucket_bytes,
        topology=_topology(parallel, ranks_per_node, engine_ranks_per_node),
    )


def _topology(parallel: ParallelConfig, ranks_per_node: int, engine_ranks_per_node: int | None) -> list[tuple[int]]:
    """The node of each rank."""
    if engine_ranks_per_node is None:
        return [(rank // ranks_per_node,) for rank in range(parallel.num_ranks)]
    trainers = [(rank // ranks_per_node,) for rank in range(parallel.world_size)]
    first = trainers[-1][0] + 1
    return trainers + [(first + rank // engine_ranks_per_node,) for rank in range(parallel.rollout_ranks)]


def align(model: ModelShape, parallel: ParallelConfig, *, ranks_per_node: int) -> ParallelConfig:
    """The layout with the rank permutation whose reshard sends the least; unpermuted where none saves anything."""
    if parallel.is_separate:
        return parallel

    def moved(layout: ParallelConfig) -> int:
        plan = reshard_plan(model, layout, ranks_per_node=ranks_per_node, itemsize=1, bucket_bytes=1 << 62)
        missing = cache(lambda overlap: int(_lower_bound(plan, overlap).sum()))
        return sum(missing(overlap) for _, overlap, _, _ in plan.steps)

    layouts = [
        dataclasses.replace(parallel, rank_permutation=rank_permutation)
        for rank_permutation in _rank_permutations(model, parallel)
    ]
    return min(layouts, key=moved) if len(layouts) > 1 else parallel


def rank_orders(model: ModelShape, parallel: ParallelConfig) -> Iterator[tuple[str, ParallelConfig]]:
    """Other orders of the trainer's ranks with their names: Megatron's other order, and permutations.

    Separate engines receive all that they hold, whatever the order.
    """
    if parallel.is_separate:
        return
    experts = parallel.etp * parallel.ep if model.num_experts else parallel.tp
    if parallel.pp > 1 and parallel.dp > 1 and parallel.tp * parallel.cp == experts:
        for order in RANK_ORDERS:
            if order != parallel.order:
                yield order, dataclasses.replace(parallel, order=order)
    for rank_permutation in _rank_permutations(model, parallel):
        if rank_permutation != parallel.rank_permutation:
            name = (
                f"permuted {rank_permutation[0]} by {rank_permutation[1]}" if rank_permutation != (1, 1) else "in order"
            )
            yield name, dataclasses.replace(parallel, rank_permutation=rank_permutation)


def _rank_permutations(model: ModelShape, parallel: ParallelConfig) -> list[tuple[int, int]]:
    """The identity, then permutations that give the ranks of an engine neighbouring trainer coordinates."""
    found = [(1, 1)]
    for size in sorted({parallel.tp, parallel.etp * parallel.ep if model.num_experts else parallel.tp}):
        small, large = sorted((size, parallel.rollout_tp))
        if 1 < small < large and large % small == 0 and parallel.world_size % large == 0:
            found.append((large // small, small) if size == large else (small, large // small))
    return found


class _Turn(NamedTuple):
    received: _Bytes
    sent: _Bytes
    copies: _Bytes
    pairs: NDArray[np.int64]


def _turn(plan: Plan, overlap: Overlap, turn: int, num_slices: int) -> _Turn:
    """Elements and copies of one tensor, per rank."""
    num = plan.num_ranks
    received, sent, copies = np.zeros((3, num), np.int64), np.zeros((3, num), np.int64), np.zeros(num, np.int64)
    pairs = []
    for index, route in enumerate(overlap.routes):
        takers, source = np.asarray(route.takers), plan.chosen(route.holders, route.takers, turn + index)
        numel = sum(region.numel for region in route.regions)
        kind = np.where(source == takers, 0, np.where(plan.nodes[source] == plan.nodes[takers], 1, 2))
        copy_templates = sum(map(len, route.copy_templates(int(source[0]), num_slices)))
        np.add.at(received, (kind, takers), numel)
        np.add.at(sent, (kind, source), numel)
        np.add.at(copies, takers, copy_templates)
        np.add.at(copies, source[kind > 0], copy_templates)
        pairs.append((source * num + takers)[kind > 0])
    return _Turn(received, sent, copies, np.concatenate(pairs))


def _lower_bound(plan: Plan, overlap: Overlap) -> _Bytes:
    missing = np.zeros(plan.num_ranks, np.int64)
    for route in overlap.routes:
        takers = np.asarray(route.takers)
        missing[takers] += sum(region.numel for region in route.regions) * ~np.isin(takers, route.holders)
    return missing


def _gathered(plan: Plan, overlap: Overlap) -> _Bytes:
    gathered = np.zeros((3, plan.num_ranks), np.int64)
    for numel, holders in overlap.cells:
        ranks = np.asarray(holders)
        kind = np.where(np.isin(plan.nodes, plan.nodes[ranks]), 1, 2)
        kind[ranks] = 0
        np.add.at(gathered, (kind, np.arange(plan.num_ranks)), numel)
    return gathered


def _count_distinct(codes: list[NDArray[np.int64]], num_ranks: int) -> int:
    seen = np.zeros(num_ranks * num_ranks, dtype=bool)
    for part in codes:
        seen[part] = True
    return int(np.count_nonzero(seen))


def _wire_seconds(by_link: NDArray[Any], speeds: Speeds) -> float:
    """Seconds of the busiest rank, NVLink and InfiniBand in parallel; `by_link` bytes [tier, rank]."""
    return float(max(by_link[1].max() / speeds.nvlink, by_link[2].max() / speeds.infiniband))
