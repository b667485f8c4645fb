"""The lines of benchmarks: a JSON object each, with its target, its spread, the machine and the versions."""

from __future__ import annotations

import json
import operator
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LINES_VARIABLE = "MEGARL_BENCH_LINES"
"""Environment variable with the path of a file to which `print_line` appends too, for a program that follows it."""
_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}


def metric_line(
    metric: str,
    values: Sequence[float],
    unit: str,
    *,
    target: str | None,
    against: str,
    machine: Mapping[str, Any],
    versions: Mapping[str, str],
    digits: int = 3,
    **more: Any,
) -> dict[str, Any]:
    """Return a line: the median of `values`, all of them as `spread`, and whether the median meets `target`.

    A target is a comparison and a number, as in `>= 0.8`; None: the metric informs, and `met` is None. Raises
    ValueError for another target.
    """
    value, is_met = statistics.median(values), None
    if target is not None:
        sign, _, number = target.partition(" ")
        if sign not in _COMPARISONS:
            raise ValueError(f"target {target!r} must be one of {' '.join(_COMPARISONS)} and a number")
        is_met = bool(_COMPARISONS[sign](value, float(number)))
    return {
        "metric": metric, "value": round(value, digits), "unit": unit, "target": target, "met": is_met,
        "spread": sorted(round(v, digits) for v in values), "against": against, **more,
        "machine": dict(machine), "versions": dict(versions),
    }  # fmt: skip


def warm_up_line(metric: str, values: Sequence[float], unit: str, **fields: Any) -> dict[str, Any]:
    """The line of a metric of which the budget allowed the round that warms up alone: no result, nothing is met."""
    line = metric_line(metric, values, unit, **{**fields, "target": None})
    return {"warm_up_of": line.pop("metric"), **line}


def print_line(line: Mapping[str, Any]) -> None:
    """Print a line at once, so that it remains if the benchmark fails later."""
    text = json.dumps(line)
    print(text, flush=True)
    if path := os.environ.get(LINES_VARIABLE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def host() -> dict[str, Any]:
    """Return processor, cores, memory in bytes, and load of the last minute."""
    processors = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": processors[0].split(":")[1].strip() if processors else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
    }


def machine() -> dict[str, Any]:
    """Return the `host` and its GPU, None where there is none."""
    import torch

    return {**host(), "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of megarl, torch and other packages."""
    versions_found = {}
    for package in ("megarl", "torch", *packages):
        try:
            versions_found[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions_found


def available_bytes() -> int:
    """Return the bytes of memory that are available without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
