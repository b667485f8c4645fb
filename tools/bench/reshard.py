"""Reshard between real CPU ranks, alternating with copying, with gathering full tensors and with Megatron's own.

    python tools/bench/reshard.py --rounds 5

Qwen3-14B's shapes, some of its layers and an eighth of its vocabulary, from Megatron tp 4 * pp 2 to vLLM tp 2 * 4
replicas; and, with less of the feed-forward and the vocabulary, to Megatron tp 2 * dp 4, since
`megatron.core.resharding` holds every weight several times. Every output is compared bit by bit before anything is
timed: a difference ends with status 1.

Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from math import prod
from typing import Any

from megarl.config.parallel import ParallelConfig
from megarl.families.model_tensors import hf_tensors
from megarl.families.shape import ModelShape
from tools.bench.parts import report
from tools.bench.resharding import reshard_ranks
from tools.bench.resharding.forked_ranks import as_rank, run_forked
from tools.bench.resharding.reshard_peers import import_megatron
from tools.bench.resharding.shards import QWEN3_14B, SMALL

RANK_BYTES = 100 << 20
"""What a forked rank takes before it holds any weights."""
STAGES = ("pack", "wire", "local", "unpack")


def model_bytes(model: ModelShape) -> int:
    return 2 * sum(map(prod, hf_tensors(model).values()))


def needed_bytes(to_vllm: ModelShape, to_megatron: ModelShape, num_ranks: int) -> int:
    """Return the bytes that the larger case needs: shards and engines' copies. Megatron stages two more copies."""
    largest_parameter = 4 * to_vllm.intermediate_size * to_vllm.hidden_size
    engines = num_ranks // 2
    return num_ranks * RANK_BYTES + max(
        model_bytes(to_vllm) * (1 + engines) + num_ranks * largest_parameter,
        model_bytes(to_megatron) * (1 + 3 * engines),
    )


def sum_over_ranks(results: Sequence[Any], method: str, key: str) -> list[float]:
    """Over the ranks, round by round."""
    return [sum(r["rounds"][i][method][key] for r in results) for i in range(len(results[0]["rounds"]))]


def slowest(results: Sequence[Any], method: str, key: str = "seconds") -> list[float]:
    """The last rank's, round by round."""
    return [max(r["rounds"][i][method][key] for r in results) for i in range(len(results[0]["rounds"]))]


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def stage_lines(prefix: str, results: Sequence[Any], base: dict[str, Any]) -> list[dict[str, Any]]:
    """Return lines with the seconds of each stage, and the bytes that ranks receive."""
    first, ours = results[0], slowest(results, "ours")
    stages = {s: statistics.median(sum_over_ranks(results, "ours", f"{s}_seconds")) / len(results) for s in STAGES}
    sent = sum(r["rounds"][0]["ours"]["received_bytes"] for r in results)
    seconds = {"plan": round(max(r["plan_seconds"] for r in results), 4), **{k: round(v, 4) for k, v in stages.items()}}
    return [
        report.metric_line(
            f"{prefix}_seconds", ours, "s", target=None, against=f"mean over ranks by stage {seconds}",
            stages=seconds, buckets=first["buckets"], received_bytes=first["received_bytes"], **base,
        ),
        report.metric_line(
            f"{prefix}_bytes", [sent / first["lower_bound_bytes"]], "of the lower bound", target="== 1.0",
            against=f"{first['lower_bound_bytes']} bytes that ranks want and do not hold", **base,
        ),
    ]  # fmt: skip


def vllm_lines(results: Sequence[Any], base: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of the reshard to vLLM, compared with memcpy and with gathered tensors."""
    lines = stage_lines("reshard_to_vllm", results, base)
    copied = ratios(sum_over_ranks(results, "memcpy", "own_seconds"), sum_over_ranks(results, "local", "own_seconds"))
    in_place = ratios(
        sum_over_ranks(results, "memcpy", "own_seconds"), sum_over_ranks(results, "ours", "local_seconds")
    )
    local_bytes = int(sum(r["rounds"][0]["ours"]["local_bytes"] for r in results))
    ours, memcpy, gathered = (slowest(results, method) for method in ("ours", "memcpy", "gathered"))
    rate = f"memcpy of {local_bytes} bytes, all ranks at once: {local_bytes / statistics.median(memcpy):.3g} B/s"
    all_bytes = [ratio * results[0]["received_bytes"] / local_bytes for ratio in ratios(memcpy, ours)]
    against = f"full tensors gathered over gloo and sliced: {statistics.median(gathered):.2f} s"
    return [
        *lines,
        report.metric_line("reshard_local_copies", copied, "of memcpy", target=">= 0.8", against=rate, **base),
        report.metric_line("reshard_local_stage", in_place, "of memcpy", target=None, against=rate, **base),
        report.metric_line("reshard_all_bytes", all_bytes, "of memcpy of all bytes", target=None, against=rate, **base),
        report.metric_line(
            "reshard_vs_gathered", ratios(gathered, ours), "times as fast", target=">= 10", against=against, **base
        ),
    ]  # fmt: skip


def megatron_lines(results: Sequence[Any], base: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of the reshard to another Megatron layout, compared with Megatron's own."""
    peer = slowest(results, "megatron")
    against = f"megatron.core.resharding over its GlooCopyService, planned before: {statistics.median(peer):.2f} s"
    return [
        *stage_lines("reshard_to_megatron", results, base),
        report.metric_line(
            "reshard_vs_megatron", ratios(peer, slowest(results, "ours")), "times as fast", target=">= 5",
            against=against, **base,
        ),
    ]  # fmt: skip


def refuse_wrong(results: Sequence[Any]) -> None:
    for rank, result in enumerate(results):
        for method, tensor in result["wrong"].items():
            raise SystemExit(f"{method} differs on rank {rank}: {tensor}")


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of Qwen3-14B's 40; memory grows with them")
    parser.add_argument("--intermediate-size", type=int, default=QWEN3_14B.intermediate_size, help="of each layer")
    parser.add_argument("--only", choices=("vllm", "megatron"), help="one of the two cases")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--small", action="store_true", help="4 ranks and a tiny model: shows that all parts work")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    if options.small:
        first = second = SMALL
        trainer = ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=2)
        target = ParallelConfig(tp=1, pp=1, dp=4, rollout_tp=1)
        bucket_bytes = 200_000
    else:
        first = dataclasses.replace(
            QWEN3_14B,
            num_layers=options.layers,
            vocab_size=QWEN3_14B.vocab_size // 8,
            intermediate_size=options.intermediate_size,
        )
        second = dataclasses.replace(
            first, num_layers=2, vocab_size=4736, intermediate_size=min(4352, options.intermediate_size)
        )
        trainer = ParallelConfig(tp=4, pp=2, dp=1, rollout_tp=2)
        target = ParallelConfig(tp=2, pp=1, dp=4, rollout_tp=1)
        bucket_bytes = options.bucket_mib << 20
    needed, available = needed_bytes(first, second, trainer.world_size), report.available_bytes()
    if needed > available:
        raise SystemExit(f"{needed / 1e9:.1f} GB are needed, {available / 1e9:.1f} GB are free: take fewer --layers")
    if options.only != "vllm":
        import_megatron()
    base: dict[str, Any] = {"versions": report.versions("megatron-core")}
    for function, model, layouts, lines_of in (
        (reshard_ranks.to_vllm, first, (trainer,), vllm_lines),
        (reshard_ranks.to_megatron, second, (trainer, target), megatron_lines),
    ):
        if options.only and not function.__name__.endswith(options.only):
            continue
        results = run_forked(function, trainer.world_size, model, *layouts, options.rounds, bucket_bytes)
        refuse_wrong(results)
        to = f"tp {target.tp} * dp {target.dp}" if len(layouts) > 1 else f"vLLM tp {trainer.rollout_tp}"
        case = f"{model_bytes(model) / 1e9:.2f} GB, tp {trainer.tp} * pp {trainer.pp} -> {to}, {bucket_bytes=}"
        for line in lines_of(results, {**base, "machine": report.machine(), "case": case}):
            report.print_line(line)


if __name__ == "__main__":
    as_rank(world_size=8)
    main()
