"""The exchanges of a reshard as programs of all its ranks: trainers and engines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape
from megarl.reshard.layouts.placed import make_reshard_layouts
from megarl.reshard.overlap import Overlap
from megarl.reshard.plan import Plan, make_plan
from megarl.reshard.staging import count_elements
from tools.collectives.programs import Call, Group, Job, Program


def plan_of(recipe: Recipe, parallel: ParallelConfig, shape: ModelShape, num_ranks: int, itemsize: int) -> Plan:
    """Return the plan of a reshard over `num_ranks` ranks: fewer than the layout's if engine replicas are lost."""
    ends = make_reshard_layouts(
        shape.with_draft_layers(recipe.trainer.trains_draft_layers),
        parallel,
        num_ranks,
        transformer_engine=True,
        engine=shape.with_draft_layers(recipe.rollout.drafts_with_model_layers),
    )
    size = recipe.cluster.ranks_per_node
    return make_plan(
        ends.sources,
        ends.destinations,
        itemsize=itemsize,
        bucket_bytes=recipe.weights.bucket_mib << 20,
        topology=[(rank // size,) for rank in range(num_ranks)],
    )


class Exchange(NamedTuple):
    """The sizes of one bucket: `numel[i]` elements go from rank `sources[i]` to rank `takers[i]`. All int64 [pairs].

    Pairs are sorted by source, then by taker. No rank is its own taker.
    """

    sources: NDArray[np.int64]
    takers: NDArray[np.int64]
    numel: NDArray[np.int64]


def exchanges(plan: Plan) -> list[Exchange]:
    """Return the exchange of each bucket, computed for all ranks at once.

    A rank of a run computes its own part alone, by `Plan.for_rank`. That takes 0.9 s for one of 1,024 ranks.
    """
    size = plan.num_ranks
    parts_of_buckets: list[list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = [[] for _ in plan.exchanged]
    sizes_of = cache(partial(_pair_sizes, plan))
    for tensor, overlap, turn, buckets in plan.steps:
        width = plan.width(tensor)
        for bucket, (pairs, numel) in zip(buckets, sizes_of(overlap, turn, len(buckets)), strict=True):
            parts_of_buckets[bucket].append((pairs, width * numel))
    exchanges_of_buckets = []
    for parts in parts_of_buckets:
        pairs, numel = (np.concatenate(part) for part in zip(*parts, strict=True))
        sums = np.bincount(pairs, weights=numel, minlength=size * size)
        present = sums.nonzero()[0]
        exchanges_of_buckets.append(Exchange(present // size, present % size, sums[present].astype(np.int64)))
    return exchanges_of_buckets


def _pair_sizes(
    plan: Plan, overlap: Overlap, turn: int, num_slices: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return the elements of each slice of a tensor: pairs (source * ranks + taker) and sizes, both int64 [pairs]."""
    slices: list[list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = [[] for _ in range(num_slices)]
    for index, flow in enumerate(overlap.flows):
        takers, sources = np.asarray(flow.takers), plan.choose_sources(flow.holders, flow.takers, turn + index)
        for source in np.unique(sources).tolist():
            pairs = source * plan.num_ranks + takers[(sources == source) & (takers != source)]
            for parts, templates in zip(slices, flow.copy_templates(source, num_slices), strict=True):
                numel = sum(prod(template.shape) for template in templates)
                parts.append((pairs, np.full(len(pairs), numel)))
    return [(np.concatenate([p for p, _ in parts]), np.concatenate([n for _, n in parts])) for parts in slices]


def differing_ranks(plan: Plan, exchanged: Sequence[Exchange], ranks: Sequence[int]) -> list[int]:
    """Return the ranks, out of `ranks`, whose own part of the plan has other sizes than `exchanged`."""
    differing = []
    for rank in ranks:
        rank_plan = plan.for_rank(rank)
        for bucket, exchange in zip(rank_plan.buckets, exchanged, strict=True):
            sent, received = (np.zeros(plan.num_ranks, np.int64) for _ in range(2))
            sends, receives = exchange.sources == rank, exchange.takers == rank
            sent[exchange.takers[sends]] = exchange.numel[sends]
            received[exchange.sources[receives]] = exchange.numel[receives]
            if (sent.tolist(), received.tolist()) != count_elements(rank_plan, bucket):
                differing.append(rank)
                break
    return differing


def reshard_job(plan: Plan, exchanged: Sequence[Exchange], dtype: str) -> Job:
    """Return the exchanges of all ranks."""
    all_ranks = tuple(range(plan.num_ranks))
    calls: list[list[Call]] = [[] for _ in all_ranks]
    for exchange, is_exchanged in zip(exchanged, plan.exchanged, strict=True):
        if not is_exchanged:
            continue
        sends = _by_rank(exchange.sources, exchange.takers, exchange.numel, plan.num_ranks)
        order = np.lexsort((exchange.sources, exchange.takers))
        receives = _by_rank(exchange.takers[order], exchange.sources[order], exchange.numel[order], plan.num_ranks)
        for rank in all_ranks:
            calls[rank].append(
                Call("all_to_all", 0, False, dtype, sends=sends[rank], receives=receives[rank], place="megarl/reshard")
            )
    return Job.of_programs(
        [Group("RESHARD", all_ranks)], [Program(rank_calls, _overlap_steps(len(rank_calls))) for rank_calls in calls]
    )


def _by_rank(
    ranks: NDArray[np.int64], peers: NDArray[np.int64], numel: NDArray[np.int64], num_ranks: int
) -> list[tuple[tuple[int, int], ...]]:
    """Return (peer, elements) of each rank. All arrays are int64 [pairs], and `ranks` is sorted."""
    ends = np.searchsorted(ranks, np.arange(num_ranks + 1)).tolist()
    pairs = list(zip(peers.tolist(), numel.tolist(), strict=True))
    return [tuple(pairs[first:end]) for first, end in pairwise(ends)]


def _overlap_steps(num_calls: int) -> list[int]:
    """Return the steps of a program that starts each call before it waits for the one before, as in a reshard."""
    steps: list[int] = []
    for call in range(num_calls):
        steps += [call] if call == 0 else [call, ~(call - 1)]
    return [*steps, ~(num_calls - 1)] if num_calls else steps
