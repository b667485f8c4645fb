"""Cost of a plan of weight copies, without starting a rank: bytes per link, copies, messages, memory, GPU time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.config import LoraConfig
from megarl.config.parallel import RANK_ORDERS, ParallelConfig
from megarl.families.model_tensors import hf_tensors
from megarl.families.shape import ModelShape
from megarl.reshard.layouts.placed import make_reshard_layouts
from megarl.reshard.layouts.vllm_adapters import VllmAdapterLayouts
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.reshard.overlap import Overlap
from megarl.reshard.plan import Plan, make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Bandwidths of a GPU in bytes per second."""

    nvlink: float
    """Bandwidth of NVLink, in each direction."""
    infiniband: float
    """Bandwidth of the network, in each direction."""
    memory: float
    """Bandwidth of device memory, reads plus writes."""


SPEEDS = {
    # NVLink and network: data sheet values. Memory: device copies on an H200 reached 4.3 of the data sheet's 4.8 TB/s;
    # all GPUs are assumed to reach this share.
    "h100": Speeds(nvlink=450e9, infiniband=50e9, memory=3.0e12),
    "h200": Speeds(nvlink=450e9, infiniband=50e9, memory=4.3e12),
    "b200": Speeds(nvlink=900e9, infiniband=50e9, memory=7.2e12),
}
"""Bandwidths by kind of GPU. Source: NVIDIA's data sheets of the SXM modules, and ConnectX-7 at 400 Gb/s per GPU."""

TIERS = ("local", "same_node", "other_node")

_Bytes = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The bytes moved by a plan, by rank.

    `received` and `sent` are [tier, rank]. A tier is a kind of link: local, same node or other node (`TIERS`).
    """

    received: _Bytes
    sent: _Bytes
    lower_bound: _Bytes
    """Minimum bytes that each rank must receive [rank]: the bytes of its engine shard outside its trainer shard."""
    gathered: _Bytes
    """Bytes that each rank would receive [tier, rank] if it gathered full tensors."""
    copies: _Bytes
    """Strided copies on each rank [rank]: local copies, packing and unpacking."""
    messages: int
    """Messages: pairs of ranks that exchange data, summed over the exchanges (buckets)."""
    buckets: int
    staging: _Bytes
    """Staging memory of each rank in bytes [rank]: its largest bucket."""
    wire_seconds: float
    """Seconds of all exchanges at full bandwidth, each as long as its busiest rank."""
    speeds: Speeds

    @property
    def ratio(self) -> float:
        """Received bytes divided by their lower bound; 1.0 if nothing must be sent."""
        least = int(self.lower_bound.sum())
        return int(self.received[1:].sum()) / least if least else 1.0

    def summary(self) -> dict[str, Any]:
        """Return means, maxima and sums over the ranks as JSON values."""

        def summarise_ranks(values: _Bytes) -> dict[str, float]:
            return {"mean": float(values.mean()), "max": int(values.max())}

        # Every copied, packed or unpacked byte is read once and written once: factor 2.
        moved_bytes = float(2 * (self.received.sum(0) + self.sent[1:].sum(0)).max())
        memory_seconds = moved_bytes / self.speeds.memory
        return {
            "received_bytes": {tier: summarise_ranks(row) for tier, row in zip(TIERS, self.received, strict=True)},
            "sent_bytes": {tier: summarise_ranks(row) for tier, row in zip(TIERS[1:], self.sent[1:], strict=True)},
            "lower_bound_bytes": summarise_ranks(self.lower_bound),
            "ratio_to_lower_bound": self.ratio,
            "gathered_bytes": {
                tier: summarise_ranks(row) for tier, row in zip(TIERS[1:], self.gathered[1:], strict=True)
            },
            "copies": summarise_ranks(self.copies),
            "messages": self.messages,
            "buckets": self.buckets,
            "staging_bytes": summarise_ranks(self.staging),
            "wire_seconds": self.wire_seconds,
            "memory_seconds": memory_seconds,
            # Copies overlap with the exchange of the next bucket, so the slower of the two decides. Kernel launches are
            # not counted.
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
    adapter: LoraConfig | None = None,
) -> dict[str, Any]:
    """Predict the cost of copying weights from trainer to engine as JSON values, also for other orders of the ranks.

    `engine_ranks_per_node` is set only for separate engines on nodes of another size. `gpu` is a key of SPEEDS. With
    `adapter`, only the matrices of a LoRA adapter are copied.
    """
    speeds = SPEEDS[gpu]
    make_plan_of = partial(
        reshard_plan,
        model,
        ranks_per_node=ranks_per_node,
        engine_ranks_per_node=engine_ranks_per_node,
        itemsize=itemsize,
        bucket_bytes=bucket_bytes,
        adapter=adapter,
    )
    started = time.process_time()
    plan = make_plan_of(parallel)
    # A real rank's planning time includes its own part of the plan. A middle rank stands for all ranks.
    plan.for_rank(parallel.num_ranks // 2)
    plan_seconds = time.process_time() - started
    return {
        "layout": dataclasses.asdict(parallel),
        "num_ranks": parallel.num_ranks,
        "ranks_per_node": ranks_per_node,
        "model_bytes": _whole_bytes(model, itemsize, adapter),
        "plan_seconds": plan_seconds,
        "reshard": measure_traffic(plan, speeds).summary(),
        "rank_orders": {
            name: measure_traffic(make_plan_of(reordered), speeds).summary()
            for name, reordered in list_rank_orders(model, parallel)
        },
        "gpu": gpu,
        "bytes_per_second": dataclasses.asdict(speeds),
    }


def _whole_bytes(model: ModelShape, itemsize: int, adapter: LoraConfig | None) -> int:
    if adapter is None:
        return sum(map(prod, hf_tensors(model).values())) * itemsize
    return VllmAdapterLayouts(VllmLayouts(model, 1, 1), adapter.targets, adapter.rank).adapter_bytes_on(0, itemsize)


def measure_traffic(plan: Plan, speeds: Speeds = SPEEDS["h200"]) -> Traffic:
    """Count the bytes moved by a plan, by rank (`Traffic`). Equal kinds of tensors are counted once."""
    num_ranks = plan.num_ranks
    received, sent, gathered = np.zeros((3, 3, num_ranks), np.int64)
    lower_bound, copies = np.zeros((2, num_ranks), np.int64)
    # Rows 0 and 1: receives on the same node and on other nodes. Rows 2 and 3: sends.
    bucket_numels = np.zeros((len(plan.exchanged), 4, num_ranks), np.float32)
    pairs_by_bucket: list[list[NDArray[np.int64]]] = [[] for _ in plan.exchanged]
    count_tensor = cache(partial(_count_tensor, plan))
    count_missing, count_gathered = (cache(partial(count, plan)) for count in (_count_missing, _count_gathered))
    for tensor, overlap, rotation, buckets in plan.steps:
        counts, width = count_tensor(overlap, rotation=rotation, num_slices=len(buckets)), plan.width(tensor)
        received += width * counts.received
        sent += width * counts.sent
        copies += counts.copies
        lower_bound += width * count_missing(overlap)
        gathered += width * count_gathered(overlap)
        for bucket in buckets:
            bucket_numels[bucket, :2] += width * counts.received[1:] / len(buckets)
            bucket_numels[bucket, 2:] += width * counts.sent[1:] / len(buckets)
            pairs_by_bucket[bucket].append(counts.pairs)
    itemsize = plan.itemsize
    return Traffic(
        received=received * itemsize,
        sent=sent * itemsize,
        lower_bound=lower_bound * itemsize,
        gathered=gathered * itemsize,
        copies=copies,
        messages=sum(_count_distinct(pairs, num_ranks) for pairs in pairs_by_bucket),
        buckets=len(plan.exchanged),
        staging=np.ceil(bucket_numels.sum(1).max(0)).astype(np.int64) * itemsize,
        # Links carry both directions at once, so the larger of receives and sends counts. Indices [0, 0, 1] insert a
        # row for the local tier; its time is never read.
        wire_seconds=sum(
            _wire_seconds(itemsize * np.maximum(numels[:2], numels[2:])[[0, 0, 1]], speeds) for numels in bucket_numels
        ),
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
    adapter: LoraConfig | None = None,
) -> Plan:
    """Return the plan that copies weights from trainer to engines, from the model's sizes alone.

    Arguments as in `forecast`.
    """
    layouts = make_reshard_layouts(model, parallel, parallel.num_ranks, adapter=adapter)
    return make_plan(
        layouts.sources,
        layouts.destinations,
        itemsize=itemsize,
        bucket_bytes=bucket_bytes,
        topology=_list_rank_nodes(parallel, ranks_per_node=ranks_per_node, engine_ranks_per_node=engine_ranks_per_node),
    )


def _list_rank_nodes(
    parallel: ParallelConfig, *, ranks_per_node: int, engine_ranks_per_node: int | None
) -> list[tuple[int]]:
    """Return each rank's node, as a topology for `make_plan`.

    `engine_ranks_per_node` None: engines use the trainers' nodes.
    """
    if engine_ranks_per_node is None:
        return [(rank // ranks_per_node,) for rank in range(parallel.num_ranks)]
    trainers = [(rank // ranks_per_node,) for rank in range(parallel.world_size)]
    # Trainers fill their nodes first. Engine nodes are numbered after the last trainer node.
    first_engine_node = trainers[-1][0] + 1
    return trainers + [(first_engine_node + rank // engine_ranks_per_node,) for rank in range(parallel.rollout_ranks)]


def order_ranks(model: ModelShape, parallel: ParallelConfig, *, ranks_per_node: int) -> ParallelConfig:
    """Return the parallel sizes with the order of trainer ranks that sends the fewest bytes in a reshard.

    Returns `parallel` itself for separate engines, or if no other order saves bytes.
    """
    if parallel.is_separate:
        return parallel

    def count_missing(candidate: ParallelConfig) -> int:
        # Only bytes count here. One huge bucket avoids the work of slicing tensors.
        plan = reshard_plan(model, candidate, ranks_per_node=ranks_per_node, itemsize=1, bucket_bytes=1 << 62)
        missing = cache(lambda overlap: int(_count_missing(plan, overlap).sum()))
        return sum(missing(overlap) for _, overlap, _, _ in plan.steps)

    candidates = [
        dataclasses.replace(parallel, rank_permutation=rank_permutation)
        for rank_permutation in _list_rank_permutations(model, parallel)
    ]
    # `min` returns the first of equal candidates. That is the identity, so ranks are permuted only if it saves bytes.
    return min(candidates, key=count_missing) if len(candidates) > 1 else parallel


def list_rank_orders(model: ModelShape, parallel: ParallelConfig) -> Iterator[tuple[str, ParallelConfig]]:
    """Yield (name, sizes) for other orders of the trainer's ranks: Megatron's other order, and rank permutations.

    Yields nothing for separate engines: they receive their whole shard in any order.
    """
    if parallel.is_separate:
        return
    expert_ranks = parallel.etp * parallel.ep if model.num_experts else parallel.tp
    # With pp > 1 the orders differ only in the places of pp and dp. Megatron-Core 0.16.1 accepts the other order only
    # if tp * cp equals etp * ep: dense and expert ranks then have the same pipeline groups.
    if parallel.pp > 1 and parallel.dp > 1 and parallel.tp * parallel.cp == expert_ranks:
        for order in RANK_ORDERS:
            if order != parallel.order:
                yield order, dataclasses.replace(parallel, order=order)
    for rank_permutation in _list_rank_permutations(model, parallel):
        if rank_permutation != parallel.rank_permutation:
            name = (
                f"permuted {rank_permutation[0]} by {rank_permutation[1]}" if rank_permutation != (1, 1) else "in order"
            )
            yield name, dataclasses.replace(parallel, rank_permutation=rank_permutation)


def _list_rank_permutations(model: ModelShape, parallel: ParallelConfig) -> list[tuple[int, int]]:
    """Return the identity (1, 1), and permutations that give each rank overlapping trainer and engine shards.

    Trainer tp 2 and engine tp 4 give (2, 2): ranks 0 and 1 train the first half and sample with its quarters.
    """
    permutations = [(1, 1)]
    for trainer_size in sorted({parallel.tp, parallel.etp * parallel.ep if model.num_experts else parallel.tp}):
        small, large = sorted((trainer_size, parallel.rollout_tp))
        if 1 < small < large and large % small == 0 and parallel.world_size % large == 0:
            ratio = large // small
            permutations.append((ratio, small) if trainer_size == large else (small, ratio))
    return permutations


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorCounts:
    """Elements sent and received, and copies, of one tensor for one choice among equal source ranks.

    Arrays are [tier, rank] or [rank]. `pairs` encodes each remote pair as `source * num_ranks + destination`.
    """

    received: _Bytes
    sent: _Bytes
    copies: _Bytes
    pairs: NDArray[np.int64]


def _count_tensor(plan: Plan, overlap: Overlap, *, rotation: int, num_slices: int) -> _TensorCounts:
    """Count a tensor's elements that each rank receives and sends, by tier (local, same node, other node), and its
    copies.
    """
    num_ranks = plan.num_ranks
    received, sent = np.zeros((2, 3, num_ranks), np.int64)
    copies = np.zeros(num_ranks, np.int64)
    pairs = []
    for index, flow in enumerate(overlap.flows):
        takers, sources = np.asarray(flow.takers), plan.choose_sources(flow.holders, flow.takers, rotation + index)
        numel = sum(region.numel for region in flow.regions)
        # 0, 1 and 2 are the indices of TIERS: local, same_node, other_node.
        tier = np.where(sources == takers, 0, np.where(plan.nodes[sources] == plan.nodes[takers], 1, 2))
        num_copies = sum(map(len, flow.copy_templates(int(sources[0]), num_slices)))
        np.add.at(received, (tier, takers), numel)
        np.add.at(sent, (tier, sources), numel)
        np.add.at(copies, takers, num_copies)
        np.add.at(copies, sources[tier > 0], num_copies)
        pairs.append((sources * num_ranks + takers)[tier > 0])
    return _TensorCounts(received=received, sent=sent, copies=copies, pairs=np.concatenate(pairs))


def _count_missing(plan: Plan, overlap: Overlap) -> _Bytes:
    missing = np.zeros(plan.num_ranks, np.int64)
    for flow in overlap.flows:
        takers = np.asarray(flow.takers)
        missing[takers] += sum(region.numel for region in flow.regions) * ~np.isin(takers, flow.holders)
    return missing


def _count_gathered(plan: Plan, overlap: Overlap) -> _Bytes:
    """Return the elements that each rank would receive if it gathered the full tensor: [tier, rank]."""
    gathered = np.zeros((3, plan.num_ranks), np.int64)
    for numel, holders in overlap.cells:
        ranks = np.asarray(holders)
        tier = np.where(np.isin(plan.nodes, plan.nodes[ranks]), 1, 2)
        tier[ranks] = 0
        np.add.at(gathered, (tier, np.arange(plan.num_ranks)), numel)
    return gathered


def _count_distinct(pairs: list[NDArray[np.int64]], num_ranks: int) -> int:
    """Return the number of distinct encoded pairs. A flag per possible pair is faster than sorting the pairs."""
    is_present = np.zeros(num_ranks * num_ranks, dtype=bool)
    for tensor_pairs in pairs:
        is_present[tensor_pairs] = True
    return int(np.count_nonzero(is_present))


def _wire_seconds(by_link: NDArray[Any], speeds: Speeds) -> float:
    """Return the seconds of the busiest rank, NVLink and network in parallel. `by_link` has bytes [tier, rank]."""
    return float(max(by_link[1].max() / speeds.nvlink, by_link[2].max() / speeds.infiniband))
