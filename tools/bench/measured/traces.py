"""Summary of a trace by torch.profiler: how long the GPU was busy, and which kernels and operators took the time."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

GPU_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
LONGEST = 10
"""Kernels and operators that are listed, those with the most time."""


def summary_of(path: Path) -> dict[str, Any]:
    """Return the summary of a trace file, with seconds and shares. On a CPU the GPU's numbers are None."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    return summarise([event for event in timed if event.get("cat") in {*GPU_KINDS, "cpu_op", "cuda_runtime"}])


def summarise(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of events with a duration."""
    if not events:
        return {"seconds": 0.0, "gpu_busy_share": None, "gpu_kernels": 0, "launches": 0, "kernels": [], "operators": []}
    start = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    on_gpu = [event for event in events if event["cat"] in GPU_KINDS]
    on_host = [event for event in events if event["cat"] not in GPU_KINDS]
    busy = union_length((event["ts"], event["ts"] + event["dur"]) for event in on_gpu)
    return {
        "seconds": round((end - start) / 1e6, 6),
        "gpu_busy_share": round(busy / max(end - start, 1e-9), 4) if on_gpu else None,
        "gpu_kernels": len(on_gpu),
        "launches": sum(event["name"] in LAUNCHES for event in on_host),
        "kernels": longest(on_gpu),
        "operators": longest(on_host),
    }


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def longest(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the names with the most time, their seconds and counts. Operators include those that they call."""
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        seconds[event["name"]] += event["dur"] / 1e6
        counts[event["name"]] += 1
    names = sorted(seconds, key=seconds.__getitem__, reverse=True)[:LONGEST]
    return [{"name": name[:120], "seconds": round(seconds[name], 6), "count": counts[name]} for name in names]
