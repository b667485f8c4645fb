"""The reshard benchmarks run for real, in miniature; numbers of a tiny model meet no target, so none is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

BENCH = Path(__file__).resolve().parents[3] / "tools" / "bench"
FIELDS = {"metric", "value", "unit", "target", "met", "spread", "against", "machine", "versions"}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600)


def lines_of(*command: str) -> dict[str, dict]:
    done = run(*command)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"metric"')]
    assert all(line.keys() >= FIELDS and min(line["spread"]) <= line["value"] <= max(line["spread"]) for line in lines)
    return {line["metric"]: line for line in lines}


@pytest.mark.long
def test_every_method_is_run_and_agrees() -> None:
    lines = lines_of(str(BENCH / "reshard.py"), "--small", "--rounds", "3")
    for case in ("vllm", "megatron"):
        moved, times = lines[f"reshard_to_{case}_bytes"], lines[f"reshard_to_{case}_seconds"]
        assert (moved["value"], moved["met"]) == (1.0, True)
        assert times["stages"].keys() == {"plan", "pack", "wire", "local", "unpack"} and len(times["spread"]) == 3
    for name, target in {"local_copies": ">= 0.8", "vs_gathered": ">= 10", "vs_megatron": ">= 5"}.items():
        line = lines[f"reshard_{name}"]
        assert line["target"] == target and line["value"] > 0 and line["met"] is not None


@pytest.mark.long
def test_one_device_repacks_a_whole_model() -> None:
    lines = lines_of(str(BENCH / "reshard_gpu.py"), "--small", "--device", "cpu", "--rounds", "3")
    assert lines.keys() == {"repack_seconds", "repack_bandwidth", "repack_vs_one_by_one", "repack_vs_buckets"}
    hidden, ffn, vocabulary = 256, 512, 1000
    attention = hidden * (2 * 8 * 32 + 2 * 8 * 32) + 2 * 32 + 2 * hidden
    assert lines["repack_seconds"]["bytes"] == 2 * (
        2 * (attention + 3 * hidden * ffn) + 2 * vocabulary * hidden + hidden
    )


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_no_gpu_is_one_line_and_status_2() -> None:
    done = run(str(BENCH / "reshard_gpu.py"))
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "needs CUDA" in done.stderr


@pytest.mark.parametrize("spoiled", ["pack", pytest.param("local", marks=pytest.mark.long)])
def test_a_wrong_output_ends_with_status_1(spoiled: str) -> None:
    """One bit of what a rank packs or copies is turned: nothing is timed."""
    code = f"""
import megarl.reshard.transport as transport, torch
from tools.bench import reshard
bind = transport._bind_buckets
def spoiled(*args):
    for step in bind(*args):
        pairs = step.{spoiled}.on_cpu
        if pairs:
            pairs[0] = pairs[0][0], pairs[0][1] ^ 1
        yield step
transport._bind_buckets = spoiled
reshard.main(["--small", "--only", "vllm"])
"""
    done = run("-c", code)
    assert done.returncode == 1 and "ours differs on rank" in done.stderr and done.stdout == ""
