"""The GPUs of this machine that a process may use, as NVIDIA's driver tells them: torch is not imported."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache


@cache
def installed_gpu_gib() -> float | None:
    """Memory of this machine's smallest GPU in GiB, of those in CUDA_VISIBLE_DEVICES where that is set.

    None where there is none, or no driver that tells.
    """
    program, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible == "":
        return None
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    query += [] if visible is None else [f"--id={visible.replace(' ', '')}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return min(float(line) for line in done.stdout.split("\n") if line.strip()) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
