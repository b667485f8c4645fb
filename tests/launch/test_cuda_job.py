"""`launch/test.sh --cuda` where it cannot run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_disk_is_refused_in_one_sentence(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=1g")
    environment = {**os.environ, "GPU_VENV": str(disk / "venv")}
    done = subprocess.run(
        ["bash", "launch/test.sh", "--cuda"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"launch/test.sh: --cuda installs the CUDA environment in {disk / 'venv'}, which needs 12 GB; 1 GB are free "
        "there: name a folder on a larger disk with GPU_VENV=DIR\n"
    )
    assert os.listdir(disk) == []
