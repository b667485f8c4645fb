"""All of Qwen3-14B on one GPU, from Megatron's layout into vLLM's, against copying, exporting and flat buckets.

    python tools/bench/reshard_gpu.py

29.5 GB -> 29.5 GB through the transport's local copies. In the same run, alternating: one device copy of as many
bytes; every tensor exported under its Hugging Face name and copied by itself; the same exported into flat buckets of
512 MB, each then taken apart. Outputs are compared bit by bit first: a difference ends with status 1. A line
is printed for each method that is checked and for each round; `--budget-seconds` may end the rounds early. Ends with
status 2 where no CUDA is. `--device cpu --small` shows that all parts work.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.reshard.boxes import Layout
from megarl.reshard.layouts.megatron import megatron_layouts, parameter_shapes
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.reshard.plan import View, make_plan
from megarl.reshard.transport import Transport, strided_view
from tools.bench.parts import report
from tools.bench.parts.budget import Budget, add_budget
from tools.bench.parts.device_parts import refuse_missing_cuda, seconds_of
from tools.bench.resharding.shards import QWEN3_14B, SMALL, Arena, fill, first_difference, storage_shapes

BUCKET_BYTES = 512 << 20
Method = Callable[[], object]


class Exporter:
    """Full tensors under their Hugging Face names, from Megatron's parameters, and where each belongs in vLLM's."""

    def __init__(
        self,
        source_layout: Layout,
        target_layout: Layout,
        sources: Mapping[str, Tensor],
        destinations: Mapping[str, Tensor],
    ) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[tuple[tuple[slice, ...], Tensor]]] = {}
        for piece in source_layout:
            box = piece.box
            view = View(piece.storage, piece.offset, piece.strides)
            part = strided_view(sources[piece.storage], view, box.shape, box.name)
            index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            self._parts.setdefault(box.name, []).append((index, part))
            self._shapes[box.name] = tuple(map(max, box.stop, self._shapes.get(box.name, box.stop)))
        self._targets = {
            piece.box.name: strided_view(
                destinations[piece.storage],
                View(piece.storage, piece.offset, piece.strides),
                piece.box.shape,
                piece.box.name,
            )
            for piece in target_layout
        }

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors. A tensor of several parts is joined in new memory."""
        for name, parts in self._parts.items():
            if len(parts) == 1:
                yield name, parts[0][1]
            else:
                full = torch.empty(self._shapes[name], dtype=torch.bfloat16, device=parts[0][1].device)
                for index, part in parts:
                    full[index].copy_(part)
                yield name, full

    def one_by_one(self) -> None:
        """Each tensor copied as it comes; parts that need no export are copied as they lie."""
        for name, tensor in self.export():
            self._targets[name].copy_(tensor)

    def in_buckets(self) -> None:
        """Collect tensors in flat buckets, and copy each full bucket into the engine's tensors."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self.export():
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                self._unpack(bucket)
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        self._unpack(bucket)

    def _unpack(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
        parts = flat.split([tensor.numel() for _, tensor in bucket])
        for (name, tensor), part in zip(bucket, parts, strict=True):
            self._targets[name].copy_(part.view(tensor.shape))


def measure(
    model: ModelShape, device: str, rounds: int, budget: Budget
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of every method in each round, and the bytes and copies of the plan."""
    parallel = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    padded = padded_vocab_size(model.vocab_size, 1)
    source_layouts = megatron_layouts(model, parallel, padded_vocab_size=padded)
    target_layouts = VllmLayouts(model, 1, 1)
    shapes = parameter_shapes(source_layouts, parallel.coordinates(0))
    sources = Arena(sum(map(prod, shapes.values())), device).tensors(shapes)
    fill(source_layouts[0], sources)
    storages = storage_shapes(target_layouts[0])
    arena = Arena(sum(map(prod, storages.values())), device)
    live = arena.tensors(storages)
    plan = make_plan(source_layouts, target_layouts, itemsize=2, bucket_bytes=256 << 20).for_rank(0)
    exporter = Exporter(source_layouts[0], target_layouts[0], sources, live)
    methods: dict[str, Method] = {
        "ours": Transport(plan, sources, live, dtype=torch.bfloat16).reshard,
        "one_by_one": exporter.one_by_one,
        "in_buckets": exporter.in_buckets,
    }
    for name, run in methods.items():
        arena.flat.zero_()
        run()
        if difference := first_difference(target_layouts[0], live):
            raise SystemExit(f"{name} differs: {difference}")
        report.print_line({"checked": name})
    local = [t for bucket in plan.buckets for t in bucket.local]
    num_bytes = 2 * sum(t.numel for t in local)
    flat = next(iter(sources.values())).untyped_storage()
    source = torch.empty(0, dtype=torch.uint8, device=device).set_(flat)[:num_bytes]
    methods["copy"] = lambda: arena.flat.view(torch.uint8)[:num_bytes].copy_(source)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for number in budget.rounds(rounds):
        for name, run in methods.items():
            seconds[name].append(seconds_of(run))
        report.print_line(
            {"round": number, "seconds": {name: round(values[-1], 5) for name, values in seconds.items()}}
        )
    return seconds, {"bytes": num_bytes, "copies": len(local)}


def lines_of(seconds: Mapping[str, Sequence[float]], plan: Mapping[str, int], **base: Any) -> list[dict[str, Any]]:
    """Return lines that compare our transport with a plain copy and with two other methods."""
    lines = [
        report.metric_line(
            "repack_seconds", seconds["ours"], "s", target=None, digits=5, **plan, **base,
            against=f"a device copy of as many bytes: {statistics.median(seconds['copy']):.5f} s",
        )
    ]  # fmt: skip
    for metric, peer, unit, target, against in (
        ("repack_bandwidth", "copy", "of a copy's bandwidth", ">= 0.9", "a device copy of as many bytes"),
        ("repack_vs_one_by_one", "one_by_one", "times as fast", ">= 5", "each tensor exported and copied by itself"),
        ("repack_vs_buckets", "in_buckets", "times as fast", ">= 2", "tensors exported into flat buckets of 512 MB"),
    ):
        ratios = [
            peer_seconds / own_seconds for peer_seconds, own_seconds in zip(seconds[peer], seconds["ours"], strict=True)
        ]
        lines.append(report.metric_line(metric, ratios, unit, target=target, against=against, **base))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=QWEN3_14B.num_layers)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model instead of Qwen3-14B")
    add_budget(parser)
    options = parser.parse_args()
    budget = Budget(options.budget_seconds)
    refuse_missing_cuda(options.device, "--device cpu --small")
    model = SMALL if options.small else dataclasses.replace(QWEN3_14B, num_layers=options.layers)
    seconds, plan = measure(model, options.device, options.rounds, budget)
    base = {"machine": report.machine(), "versions": report.versions(), "case": f"{plan['bytes'] / 1e9:.3f} GB"}
    for line in lines_of(seconds, plan, **base):
        report.print_line(line)


if __name__ == "__main__":
    main()
