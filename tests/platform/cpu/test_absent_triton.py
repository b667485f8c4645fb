"""The import of Megatron-Core without Triton, on a package of its file's name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib.util, sys
from megarl.platform.cpu import absent_triton
absent_triton.install()
assert importlib.util.find_spec("triton") is None and not any(name.startswith("triton") for name in sys.modules)
stash = sys.modules.get(absent_triton.PAGED_STASH)
print("absent" if stash is None else stash.SIZE)
if stash is not None:
    try:
        stash.copy_kernel[(1,)]()
    except ImportError as error:
        print(error)
"""
PAGED_STASH = """import triton
import triton.language as tl
@triton.jit
def copy_kernel(pointer, size: tl.constexpr): tl.load(pointer)
SIZE = 1024
"""


def run(folder: Path) -> list[str]:
    environment = {"PYTHONPATH": f"{folder}:{Path(__file__).parents[3]}", "PATH": ""}
    command = [sys.executable, "-S", "-c", PROGRAM]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()


def test_one_file_is_loaded_without_triton_and_its_kernels_say_why_they_do_not_run(tmp_path: Path) -> None:
    file = tmp_path / "megatron/core/transformer/moe/ops/paged_stash.py"
    file.parent.mkdir(parents=True)
    file.write_text(PAGED_STASH)
    size, error = run(tmp_path)
    assert size == "1024" and "copy_kernel is a Triton kernel, but Triton is not installed" in error


def test_nothing_is_loaded_if_megatron_has_no_such_file(tmp_path: Path) -> None:
    assert run(tmp_path) == ["absent"]
