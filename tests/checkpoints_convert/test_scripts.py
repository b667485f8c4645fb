"""The scripts as a person runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.files.model_folder import CHECKSUMS

pytestmark = pytest.mark.distributed

FOLDER = Path(__file__).resolve().parent.parent.parent / "checkpoints_convert"


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def test_there_and_back(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    source = tiny_model(hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=4, intermediate_size=48)
    megatron, back = tmp_path / "megatron", tmp_path / "hf"
    layout = ("--tp", "2", "--pp", "2", "--verify")
    there = run("hf_to_megatron.py", "--hf", source, "--out", megatron, *layout)
    assert (there.returncode, there.stderr) == (0, "")
    assert there.stdout.startswith(f"wrote {megatron}: 24 tensors, ") and there.stdout.endswith(" s, verified\n")
    again = run("megatron_to_hf.py", "--megatron", megatron, "--out", back)
    assert (again.returncode, again.stderr) == (0, "")
    assert {p.name for p in back.iterdir()} == {p.name for p in source.iterdir()} | {"manifest.json", CHECKSUMS}
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_errors_are_one_message(tmp_path: Path) -> None:
    done = run("megatron_to_hf.py", "--megatron", tmp_path, "--out", tmp_path / "new", "--hf", tmp_path)
    assert done.returncode == 65
    assert done.stderr.startswith(f"error: {tmp_path}/config.json: not found.") and "Traceback" not in done.stderr
    assert run("hf_to_megatron.py", "--hf", tmp_path).returncode == 2
