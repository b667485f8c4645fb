"""torch's allocator: its setting on GPUs, in processes of their own, because it holds for a whole process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import torch
from megarl.platform import device
from megarl.platform.memory.allocator import use_expandable_segments
if {has_gpu}:
    device.current = lambda: torch.device("cuda", 0)
print(use_expandable_segments(), torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.parametrize(
    ("has_gpu", "given", "printed"),
    [
        (True, {}, "True expandable_segments:True"),
        (False, {}, "False"),
        (True, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "False expandable_segments:False"),
        (True, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "False expandable_segments:False"),
    ],
)
def test_only_ranks_on_gpus_change_the_setting(has_gpu: bool, given: dict[str, str], printed: str) -> None:
    """torch's own record of the settings says what holds. A build for CPUs has it too."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(has_gpu=has_gpu)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == printed
