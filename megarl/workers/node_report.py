"""What a node has, told by its ranks before anything heavy is started there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_CLOCK_SECONDS = 60.0
_LEAST_FREE_BYTES = 1 << 30


class NodeReport:
    """A worker that only looks around."""

    def __init__(self, rank: int, world_size: int) -> None: ...

    def look(self, folders: Sequence[str], run_folder: str) -> dict[str, Any] | None:
        """Of this rank's node: its name, which folders it cannot read, room in the run's folder, GPUs, clock.

        One rank of a node looks; None from the others.
        """
        if os.environ["LOCAL_RANK"] != "0":
            return None
        writable = Path(run_folder)
        return {
            "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
            "unread": [folder for folder in folders if not os.access(folder, os.R_OK)],
            "is_writable": writable.is_dir() and os.access(writable, os.W_OK),
            "free_bytes": shutil.disk_usage(writable).free if writable.is_dir() else 0,
            "gpus": _gpus(),
            "time": time.time(),
        }


def _gpus() -> list[str]:
    """Name and driver of each GPU that the node's driver shows; none where there is no driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def faults(reports: Sequence[Mapping[str, Any]], run_folder: str, ranks_per_node: int) -> Iterator[str]:
    """What keeps a run from its nodes, a line each: the node, what is wrong, what to do."""
    nodes = {report["node"]: report for report in reports}
    most = max(len(report["gpus"]) for report in reports)
    drivers = {gpu for report in reports for gpu in report["gpus"]}
    clock = sorted(report["time"] for report in reports)[len(reports) // 2]
    for node, report in nodes.items():
        for folder in report["unread"]:
            yield f"node {node}: {folder} is not there or cannot be read; put it on storage that all nodes share"
        if not report["is_writable"]:
            yield f"node {node}: {run_folder} cannot be written; set runs_folder to storage that all nodes share"
        elif report["free_bytes"] < _LEAST_FREE_BYTES:
            free = report["free_bytes"] / 2**20
            yield f"node {node}: {run_folder} has {free:.0f} MiB left; make room or set runs_folder"
        if most and len(report["gpus"]) < max(ranks_per_node, most):
            yield f"node {node}: shows {len(report['gpus'])} GPUs, the run needs {ranks_per_node}; exclude the node"
        if abs(report["time"] - clock) > _CLOCK_SECONDS:
            yield f"node {node}: its clock is {report['time'] - clock:+.0f} s off; have it set"
    if len(drivers) > 1:
        yield f"nodes have different GPUs or drivers: {', '.join(sorted(drivers))}; take nodes of one kind"
