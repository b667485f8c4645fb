"""Pack drawn lengths of sequences for eight data-parallel ranks, compared with the packing of peers' releases.

    pip install --no-deps --target PEERS verl rl-square
    python tools/bench/packing.py --peers PEERS

Costs are Qwen3-14B's FLOPs. Prints one JSON object a line for every distribution: the worst share of the ranks' time
that is work when they meet at every microbatch (lockstep), the fullest microbatch over the cap, the share of the room
that is filled against the best peer, and the time to plan. Of a peer's release only the functions named below are
loaded, as they are; the loops around them are replayed here. NeMo-RL has no release to install: first-fit decreasing,
as its algorithm is named, is written here.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import heapq
import os
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from report import machine, metric_line, print_line, versions

from megarl.data.packing import attention_ratio, pack
from megarl.families.shape import shape_from_config

QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}

DISTRIBUTIONS = {
    "mean 1.0k, cap 4k": (740, 0.8, 4096, 4096),
    "mean 3.2k clipped at 4k, cap 4k": (3800, 0.6, 4096, 4096),
    "median 3k, max 16k, cap 16k": (3000, 0.9, 16384, 16384),
    "median 6k, max 32k, cap 32k": (6000, 0.9, 32768, 32768),
    "median 6k, max 32k, cap 64k": (6000, 0.9, 32768, 65536),
}
"""Median and sigma of a log-normal, longest sequence, most tokens of a microbatch."""

NUM_RANKS, DRAWS, REPEATS = 8, 5, 5
PLAN_SECONDS = {512: 0.020, 2048: 0.100}
VERL, RL2 = Path("verl/utils/seqlen_balancing.py"), Path("RL2/utils/seqlen_balance.py")
Packing = list[list[list[int]]]
Packer = Callable[[list[int], int], Packing]


def released(path: Path, names: Iterable[str]) -> SimpleNamespace:
    """Functions of a module without what it imports, which would be whole frameworks."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    scope: dict[str, Any] = {"heapq": heapq}
    exec(compile(tree, str(path), "exec", flags=__future__.annotations.compiler_flag), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


def verl_packer(path: Path) -> Packer:
    """Ranks balanced by its workload, then microbatches on each, as many as the neediest rank takes."""
    names = ("calculate_workload", "karmarkar_karp", "get_seqlen_balanced_partitions")
    verl = released(path, names)

    def run(lengths: list[int], max_tokens: int) -> Packing:
        work = verl.calculate_workload(np.array(lengths)).tolist()
        ranks = verl.get_seqlen_balanced_partitions(work, NUM_RANKS, equal_size=True)
        num_rows = max(-(-sum(lengths[i] for i in rank) // max_tokens) for rank in ranks)
        while True:
            packing = []
            for rank in ranks:
                parts = verl.get_seqlen_balanced_partitions([work[i] for i in rank], num_rows, equal_size=False)
                parts.sort(key=lambda part: (sum(work[rank[i]] for i in part), part[0]), reverse=True)
                packing.append([[rank[i] for i in part] for part in parts[::2][::-1] + parts[1::2]])
            if max(sum(lengths[i] for i in bin) for rank in packing for bin in rank) <= max_tokens:
                return packing
            num_rows += 1

    return run


def rl2_packer(path: Path) -> Packer:
    """Token counts balanced over all microbatches, a multiple of the ranks, then dealt out in blocks."""
    rl2 = released(path, ("karmarkar_karp", "get_seqlen_balanced_partitions"))
    rl2.karmarkar_karp.__globals__.update(List=list, Tuple=tuple)

    def run(lengths: list[int], max_tokens: int) -> Packing:
        num_bins = -(-sum(lengths) // (max_tokens * NUM_RANKS)) * NUM_RANKS
        while True:
            bins = rl2.get_seqlen_balanced_partitions(lengths, k_partitions=num_bins, equal_size=False)
            if max(sum(lengths[i] for i in bin) for bin in bins) <= max_tokens:
                rows = num_bins // NUM_RANKS
                return [bins[rank * rows : (rank + 1) * rows] for rank in range(NUM_RANKS)]
            num_bins += NUM_RANKS

    return run


def first_fit_decreasing(lengths: list[int], max_tokens: int) -> Packing:
    """Longest first into the first bin with room; the fullest split until the ranks get equally many; dealt in turn."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((bin for bin, room in enumerate(rooms) if room >= lengths[item]), len(bins))
        if place == len(bins):
            bins.append([])
            rooms.append(max_tokens)
        bins[place].append(item)
        rooms[place] -= lengths[item]
    while len(bins) % NUM_RANKS:
        bins.append([max(bins, key=len).pop()])
    return [bins[rank::NUM_RANKS] for rank in range(NUM_RANKS)]


def lengths_of(name: str, num_sequences: int, seed: int) -> list[int]:
    median, sigma, longest, _ = DISTRIBUTIONS[name]
    draw = np.random.default_rng(seed).lognormal(np.log(median), sigma, num_sequences)
    return np.clip(draw, 16, longest).astype(int).tolist()


def judge(packing: Packing, lengths: list[int], ratio: float, max_tokens: int) -> tuple[float, float, float]:
    """Lockstep efficiency, fullest microbatch over the cap, share filled."""
    tokens = np.array(lengths)
    costs = tokens * (1 + tokens / ratio)
    held = [[int(tokens[bin].sum()) for bin in rank] for rank in packing]
    loads = np.array([[costs[bin].sum() for bin in rank] for rank in packing])
    largest = max(map(max, held))
    assert sorted(i for rank in packing for bin in rank for i in bin) == list(range(len(lengths)))
    filled = tokens.sum() / (loads.size * max(max_tokens, largest))
    return costs.sum() / (NUM_RANKS * loads.max(axis=0).sum()), largest / max_tokens, filled


def timed(packer: Packer, lengths: list[int], max_tokens: int, repeats: int) -> tuple[Packing, float, float]:
    """Its packing and its quickest of some runs: seconds of the clock and of the processor."""
    packing, wall, processor = [], [], []
    for _ in range(repeats):
        given = deepcopy(lengths)
        before = time.perf_counter(), time.process_time()
        packing = packer(given, max_tokens)
        wall.append(time.perf_counter() - before[0])
        processor.append(time.process_time() - before[1])
    return packing, min(wall), min(processor)


def lines(name: str, num_sequences: int, packers: dict[str, Packer], ratio: float) -> Iterable[dict[str, Any]]:
    cap = DISTRIBUTIONS[name][3]
    judged: dict[str, list[tuple[float, float, float]]] = {}
    seconds: dict[str, list[tuple[float, float]]] = {}
    for seed in range(DRAWS):
        lengths = lengths_of(name, num_sequences, seed)
        for who, packer in packers.items():
            packing, wall, processor = timed(packer, lengths, cap, REPEATS if who == "megarl" else 1)
            judged.setdefault(who, []).append(judge(packing, lengths, ratio, cap))
            seconds.setdefault(who, []).append((wall, processor))
    lockstep, over, fill = zip(*judged["megarl"], strict=True)
    wall, processor = zip(*seconds["megarl"], strict=True)
    peers = {
        who: {
            "lockstep": round(min(v[0] for v in values), 4), "over": round(max(v[1] for v in values), 4),
            "fill": round(float(np.mean([v[2] for v in values])), 4),
            "seconds": round(max(s[1] for s in seconds[who]), 4),
        }
        for who, values in judged.items() if who != "megarl"
    }  # fmt: skip
    behind = [max(values[seed][2] for values in judged.values()) - fill[seed] for seed in range(DRAWS)]
    rows = [
        ("lockstep", min(lockstep), "FLOPs / FLOPs waited for, worst draw", ">= 0.99", lockstep),
        ("over", max(over), "fullest microbatch / cap, worst draw", "<= 1.0", over),
        ("fill_behind", max(behind), "share of room, behind the best peer, worst draw", "<= 0.005", behind),
        ("plan_time", max(wall), f"s, quickest of {REPEATS}, worst draw", f"<= {PLAN_SECONDS[num_sequences]}", wall),
    ]
    shared = {
        "machine": machine(), "versions": versions("numpy"), "digits": 4,
        "case": f"{name}, {num_sequences} sequences, {NUM_RANKS} ranks",
    }  # fmt: skip
    for metric, value, unit, target, draws in rows:
        more = {"draws": [round(float(v), 4) for v in draws], "peers": peers}
        if metric == "plan_time":
            more["processor_seconds"] = [round(v, 4) for v in processor]
        yield metric_line(
            f"packing_{metric}", [float(value)], unit, target=target, against=", ".join(peers), **more, **shared
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder that the peers were installed into")
    folder = parser.parse_args().peers
    ratio = attention_ratio(shape_from_config(QWEN3_14B))
    packers: dict[str, Packer] = {"megarl": lambda lengths, cap: pack(
        lengths, max_tokens=cap, num_ranks=NUM_RANKS, attention_ratio=ratio
    )}  # fmt: skip
    found = {d.metadata["Name"]: d.version for d in distributions(path=[str(folder)])} if folder else {}
    for name, path, make in (("verl", VERL, verl_packer), ("rl-square", RL2, rl2_packer)):
        if folder and (folder / path).is_file():
            packers[f"{name} {found.get(name, '')}".strip()] = make(folder / path)
        else:
            print_line({"peer": name, "measured": False, "why": f"no {path} in {folder or 'a folder: give --peers'}"})
    packers["first-fit decreasing, written here"] = first_fit_decreasing
    for num_sequences in PLAN_SECONDS:
        for name in DISTRIBUTIONS:
            chosen = packers if num_sequences == 512 else {"megarl": packers["megarl"]}
            for line in lines(name, num_sequences, chosen, ratio):
                if num_sequences == 512 or line["metric"] != "packing_fill_behind":
                    print_line(line)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
