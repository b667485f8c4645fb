"""The GPUs of this machine that a process may use, as NVIDIA's driver tells them: torch is not imported."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from typing import NamedTuple

Capability = tuple[int, int]
"""A GPU's compute capability: major, minor."""


class Gpu(NamedTuple):
    """A GPU: its name, its compute capability where that is known, and its memory in GiB; 0 where that is not."""

    name: str
    capability: Capability | None
    gib: float = 0.0


@cache
def installed_gpus() -> tuple[Gpu, ...]:
    """This machine's GPUs, of those in CUDA_VISIBLE_DEVICES where that is set; none without a driver that tells."""
    program, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible == "":
        return ()
    query = [program, "--query-gpu=memory.total,compute_cap,name", "--format=csv,noheader,nounits"]
    query += [] if visible is None else [f"--id={visible.replace(' ', '')}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return tuple(_gpu(line) for line in done.stdout.split("\n") if line.strip())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def _gpu(line: str) -> Gpu:
    memory, capability, name = line.split(", ", 2)
    major, _, minor = capability.partition(".")
    # A driver that does not tell one says [N/A].
    known = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    return Gpu(name.strip(), known, float(memory) / 1024)


def installed_gpu_gib() -> float | None:
    """Memory of the smallest of `installed_gpus` in GiB; None where there is none."""
    return min((gpu.gib for gpu in installed_gpus()), default=None)
