"""GPUs that a process on this machine may use, as reported by nvidia-smi. Does not import torch."""

from __future__ import annotations

import os
import re
import shutil
from functools import cache
from typing import NamedTuple

from megarl.platform.commands import run_command

Capability = tuple[int, int]
"""A GPU's compute capability: major, minor."""


class Gpu(NamedTuple):
    """A GPU: its name, compute capability and memory in GiB. None: unknown."""

    name: str
    capability: Capability | None = None
    gib: float | None = None


@cache
def installed_gpus() -> tuple[Gpu, ...]:
    """Return this machine's GPUs, limited to CUDA_VISIBLE_DEVICES if set; none if nvidia-smi fails."""
    program, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible == "":
        return ()
    query = [program, "--query-gpu=memory.total,compute_cap,name", "--format=csv,noheader,nounits"]
    query += [] if visible is None else [f"--id={visible.replace(' ', '')}"]
    try:
        return tuple(_parse_gpu(line) for line in _run_nvidia_smi(query).split("\n") if line.strip())
    except (OSError, ValueError):
        return ()


@cache
def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, e.g. "570.86.15"; None: unknown."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        versions = re.findall(r"^\d+(?:\.\d+)*$", _run_nvidia_smi(query), re.MULTILINE)
    except OSError:
        return None
    return versions[0] if versions else None


def _run_nvidia_smi(query: list[str]) -> str:
    # With a time limit: nvidia-smi hangs on some broken GPUs.
    result = run_command(query, seconds=20)
    if result.returncode:
        raise OSError(f"nvidia-smi ended with {result.returncode}")
    return result.stdout


def _parse_gpu(line: str) -> Gpu:
    """Parse one line of nvidia-smi's list of GPUs. [N/A] means an unknown value."""
    memory, capability, name = line.split(", ", 2)
    major, _, minor = capability.partition(".")
    compute_capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    return Gpu(name.strip(), compute_capability, float(memory) / 1024 if memory.strip().isdigit() else None)


def installed_gpu_gib() -> float | None:
    """Return the memory in GiB of the machine's smallest usable GPU, or None."""
    return min((gpu.gib for gpu in installed_gpus() if gpu.gib is not None), default=None)
