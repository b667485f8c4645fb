"""A rank's report on its node. `node_checks` finds faults in the reports.

Every rank imports this module, so it imports no recipe: pydantic's models take 0.1 s of CPU time per rank.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megarl.platform import chosen_device, compilers, cuda_extensions, device
from megarl.platform.commands import run_command
from megarl.platform.gpu_needs import library_versions
from megarl.platform.memory.host_memory import machine_bytes
from megarl.platform.memory.shared_memory import check_shared_memory
from megarl.platform.visible_gpus import installed_gpus
from megarl.types import DiskFullError, MegarlError

_REACH_SECONDS = 10.0
"""Seconds for a connection from one node to another."""


class NodeReport:
    """Worker class of a rank that inspects its node. One rank per node works; the others return None."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._server: socket.socket | None = None

    def inspect_node(
        self, models: Sequence[str], run_folder: str, substitute_ranks: Collection[int] = (), first_rank: int = 0
    ) -> dict[str, Any] | None:
        """Inspect this rank's node, and return the report as plain data. Return None if another rank inspects the node.

        Usually the rank with LOCAL_RANK 0 inspects its node. `substitute_ranks` (numbers in the run) do it on nodes
        without such a rank, after a resize. `first_rank` is the number of this group's first rank in the run. The
        report's `port` is a TCP port for connection tests by other nodes, open until `close`.
        """
        if os.environ["LOCAL_RANK"] != "0" and first_rank + self._rank not in substitute_ranks:
            return None
        run_path, has_cuda = Path(run_folder), device.current().type == "cuda"
        self._server = socket.create_server(("", 0), backlog=4096)
        return {
            # A folder may exist as an empty mount point, so the check reads a file in it.
            "unread": [folder for folder in models if not os.access(Path(folder) / "config.json", os.R_OK)],
            "is_writable": run_path.is_dir() and os.access(run_path, os.W_OK),
            "free_bytes": shutil.disk_usage(run_path).free if run_path.is_dir() else 0,
            "memory": machine_bytes(),
            **_find_shared_memory_faults(),
            "device": device.fault(),
            # nvidia-smi lists GPUs that a run with cluster.device = cpu does not use.
            "gpus": [] if chosen_device.read_choice() == "cpu" else gpus(),
            "usable_gpus": installed_gpus(),
            "versions": None if cuda_extensions.runs_on_cpu() else library_versions(),
            "broken": cuda_extensions.import_faults(),
            "compiler": compilers.extension_fault() if has_cuda else None,
            "time": time.time(),
            "port": self._server.getsockname()[1],
        }

    def test_connections(self, addresses: Mapping[str, tuple[str, int]]) -> dict[str, str] | None:
        """Connect from this rank's node to these addresses, and return the reasons of failures by node.

        Returns None if another rank of this node makes the check.
        """
        if self._server is None:
            return None
        with ThreadPoolExecutor(len(addresses)) as pool:
            problems_by_address = pool.map(_find_connection_problem, addresses.values())
            return {node: problem for node, problem in zip(addresses, problems_by_address, strict=True) if problem}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def _find_shared_memory_faults() -> dict[str, str | None]:
    """Return why shared memory cannot be used, by the report's key; None: no fault."""
    faults: dict[str, str | None] = dict.fromkeys(("shared_memory", "full_shared_memory"))
    try:
        check_shared_memory()
    except DiskFullError as error:
        faults["full_shared_memory"] = str(error)
    except MegarlError as error:
        faults["shared_memory"] = str(error)
    return faults


def _find_connection_problem(address: tuple[str, int]) -> str | None:
    try:
        socket.create_connection(address, _REACH_SECONDS).close()
    except OSError as error:
        return str(error)


def gpus() -> list[str]:
    """Return name and driver version of each GPU; empty without the NVIDIA driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        # nvidia-smi hangs on some broken GPUs, hence the timeout.
        process = run_command(command, seconds=30)
    except OSError:
        return []
    return process.stdout.splitlines() if process.returncode == 0 else []
