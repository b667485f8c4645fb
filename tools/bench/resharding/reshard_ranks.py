"""The reshard benchmark's rank: builds weights, checks every method's output, then times the methods in turn."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.reshard.boxes import Layout
from megarl.reshard.forecast.cost_model import measure_traffic, order_ranks
from megarl.reshard.layouts.megatron import MegatronLayouts, megatron_layouts, parameter_shapes
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.reshard.plan import Plan, RankBucket, RankPlan, make_plan
from megarl.reshard.transport import CopyReport, Transport
from tools.bench.resharding.reshard_peers import Gathered, MegatronResharding
from tools.bench.resharding.shards import Arena, fill, first_difference, storage_shapes

Method = Callable[[], CopyReport | dict[str, float] | None]


def to_vllm(model: ModelShape, parallel: ParallelConfig, rounds: int, bucket_bytes: int) -> dict[str, Any]:
    """Reshard Megatron's shards to vLLM's. Time our transport, its local copies, `memcpy`, and full gathers."""
    parallel = order_ranks(model, parallel, ranks_per_node=parallel.world_size)
    rank, padded = dist.get_rank(), padded_vocab_size(model.vocab_size, parallel.tp)
    layouts = megatron_layouts(model, parallel, padded_vocab_size=padded)
    engine_layouts = VllmLayouts(model, parallel.rollout_tp, parallel.world_size)
    plan, part, plan_seconds = _make_plan(layouts, engine_layouts, bucket_bytes)
    sources = _sources(layouts)
    shapes = storage_shapes(engine_layouts[rank])
    arena = Arena(sum(map(prod, shapes.values())))
    live = arena.tensors(shapes)
    transport = Transport(part, sources, live, dtype=torch.bfloat16)
    alone = dataclasses.replace(part, buckets=tuple(RankBucket(b.local, (), (), False) for b in part.buckets))
    local_bytes = 2 * sum(t.numel for b in part.buckets for t in b.local)
    methods: dict[str, Method] = {
        "ours": transport.reshard,
        "gathered": Gathered(layouts, parallel.rollout_tp, sources, live).run,
        "gloo": Transport(part, sources, live, dtype=torch.bfloat16, shared_memory=False).reshard,
    }
    wrong_tensors = _find_wrong_tensors(methods, engine_layouts[rank], live, arena)
    methods["local"] = Transport(alone, sources, live, dtype=torch.bfloat16).reshard
    methods["memcpy"] = _memcpy(arena, local_bytes)
    del methods["gloo"]
    return {
        "wrong": wrong_tensors,
        "rounds": _time_rounds(methods, rounds),
        "plan_seconds": plan_seconds,
        **_traffic(plan),
    }


def to_megatron(
    model: ModelShape, source: ParallelConfig, target: ParallelConfig, rounds: int, bucket_bytes: int
) -> dict[str, Any]:
    """Reshard Megatron's shards to another layout. Time our transport and `megatron.core.resharding`."""
    rank, padded = dist.get_rank(), padded_vocab_size(model.vocab_size, source.tp)
    layouts = megatron_layouts(model, source, padded_vocab_size=padded)
    target_layouts = megatron_layouts(model, target, padded_vocab_size=padded)
    plan, part, plan_seconds = _make_plan(layouts, target_layouts, bucket_bytes)
    sources = _sources(layouts)
    shapes = _shapes(target_layouts)
    arena = Arena(sum(map(prod, shapes.values())))
    live = arena.tensors(shapes)
    start = time.perf_counter()
    peer = MegatronResharding(layouts, target_layouts, sources, live)
    methods: dict[str, Method] = {
        "ours": Transport(part, sources, live, dtype=torch.bfloat16).reshard,
        "megatron": peer.run,
    }
    wrong_tensors = _find_wrong_tensors(methods, target_layouts[rank], live, arena)
    peer_seconds = time.perf_counter() - start
    return {
        "wrong": wrong_tensors, "rounds": _time_rounds(methods, rounds), "plan_seconds": plan_seconds,
        "peer_start_seconds": peer_seconds, **_traffic(plan),
    }  # fmt: skip


def _make_plan(layouts: Any, target_layouts: Any, bucket_bytes: int) -> tuple[Plan, RankPlan, float]:
    start = time.perf_counter()
    plan = make_plan(layouts, target_layouts, itemsize=2, bucket_bytes=bucket_bytes)
    part = plan.for_rank(dist.get_rank())
    return plan, part, time.perf_counter() - start


def _sources(layouts: MegatronLayouts) -> dict[str, torch.Tensor]:
    """Return this rank's shards. Each element has bits of its own."""
    shapes = _shapes(layouts)
    tensors = Arena(sum(map(prod, shapes.values()))).tensors(shapes)
    fill(layouts[dist.get_rank()], tensors)
    return tensors


def _shapes(layouts: MegatronLayouts) -> dict[str, tuple[int, ...]]:
    return parameter_shapes(layouts, layouts.parallel.coordinates(dist.get_rank()))


def _find_wrong_tensors(
    methods: dict[str, Method], target_layout: Layout, live: dict[str, torch.Tensor], arena: Arena
) -> dict[str, str]:
    """Run each method on zeroed tensors. Returns the first wrong tensor, by method."""
    wrong = {}
    for name, run in methods.items():
        arena.flat.zero_()
        dist.barrier()
        run()
        dist.barrier()
        if difference := first_difference(target_layout, live):
            wrong[name] = difference
    return wrong


def _memcpy(arena: Arena, num_bytes: int) -> Method:
    """Return a copy of `num_bytes` by the C library, from one end of the destinations to the other."""
    block = arena.flat.view(torch.uint8).numpy()
    target, source = block[:num_bytes], block[len(block) - num_bytes :]
    return lambda: np.copyto(target, source)


def _time_rounds(methods: dict[str, Method], rounds: int) -> list[dict[str, dict[str, float]]]:
    """Return the seconds of each method in each round: of this rank, of all ranks, and by stage.

    Each round begins with another method, because one that allocates much slows the next.
    """
    measured, names = [], list(methods)
    for first_index in range(rounds):
        measured.append({})
        for name in names[first_index % len(names) :] + names[: first_index % len(names)]:
            run = methods[name]
            dist.barrier()
            start = time.perf_counter()
            report = run()
            rank_seconds = time.perf_counter() - start
            stages = _named(report) if isinstance(report, CopyReport) else report or {}
            dist.barrier()
            measured[-1][name] = {**stages, "own_seconds": rank_seconds, "seconds": time.perf_counter() - start}
    return measured


def _named(report: CopyReport) -> dict[str, float]:
    """A transport's seconds and bytes, by names that tell them apart."""
    seconds = {f"{stage}_seconds": value for stage, value in report.seconds.items()}
    return seconds | {f"{kind}_bytes": float(value) for kind, value in report.num_bytes.items()}


def _traffic(plan: Plan) -> dict[str, Any]:
    traffic = measure_traffic(plan)
    return {
        "received_bytes": int(traffic.received.sum()), "moved_bytes": int(traffic.received[1:].sum()),
        "lower_bound_bytes": int(traffic.lower_bound.sum()), "ratio": traffic.ratio, "buckets": traffic.buckets,
    }  # fmt: skip
