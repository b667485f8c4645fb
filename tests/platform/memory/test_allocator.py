"""torch's allocator: its setting on GPUs, in forked processes, because it holds for a whole process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# torch reads the variables as the setting is first asked for, so each fork of one process may have its own.
_PROGRAM = """
import json, os, sys
import torch
from megarl.platform import device
from megarl.platform.memory.allocator import use_expandable_segments
for has_gpu, given, _ in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os.environ.update(given)
        if has_gpu:
            device.current = lambda: torch.device("cuda", 0)
        print(use_expandable_segments(), torch._C._accelerator_getAllocatorSettings(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
_CASES = [
    (True, {}, "True expandable_segments:True"),
    (False, {}, "False"),
    (True, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "False expandable_segments:False"),
    (True, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "False expandable_segments:False"),
]
"""Whether the process has a GPU, its variables, and what it prints."""


def test_only_ranks_on_gpus_change_the_setting() -> None:
    """torch's own record of the settings says what holds. A build for CPUs has it too."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(_CASES)],
        env={name: value for name, value in os.environ.items() if name not in names},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.strip() for line in done.stdout.splitlines()] == [printed for *_, printed in _CASES]
