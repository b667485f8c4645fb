"""Devices of other properties, and megarl's messages: an old driver, a missing device, too little memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.standin_gpu
ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]

SEEN = """
import torch
numbers = range(torch.cuda.device_count())
print(len(numbers), [torch.cuda.get_device_properties(number).uuid.bytes[-1] for number in numbers])
"""


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "3 [0, 1, 2]"),
        ("2,0", "2 [2, 0]"),
        ("", "0 []"),
        ("1,7,2", "1 [1]"),
        ("1,1", "0 []"),
        ("GPU-7374616e-6469-6e5f-6770-750000000002", "1 [2]"),
        ("GPU-7374", "0 []"),
    ],
)
def test_visible_devices_are_those_of_cuda(on_devices: Run, visible: str | None, expected: str) -> None:
    """Numbers and UUIDs; an unknown entry ends the list, a repeated one empties it, an ambiguous one is unknown."""
    variables = None if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = on_devices("-c", SEEN, count=3, variables=variables)
    assert done.stdout.strip() == expected, done.stderr


def test_megarl_sees_the_devices_of_the_variable(on_devices: Run) -> None:
    program = "from megarl.platform.visible_gpus import installed_gpus; print(installed_gpus())"
    all_of_them = on_devices("-c", program, count=3)
    assert all_of_them.stdout.count("NVIDIA H200") == 3, all_of_them.stderr
    one = on_devices("-c", program, count=3, variables={"CUDA_VISIBLE_DEVICES": "2"})
    assert one.stdout.count("Gpu(name='NVIDIA H200', capability=(9, 0), gib=140.4") == 1, one.stdout + one.stderr
    unknown = on_devices("-c", program, count=3, variables={"CUDA_VISIBLE_DEVICES": "5"})
    assert unknown.stdout == "()\n"


def test_an_old_driver_is_named_by_torch_and_by_megarl(on_devices: Run) -> None:
    program = """
import torch
from megarl.platform.device import fault
print(torch.cuda.is_available(), fault("cuda"))
"""
    done = on_devices("-c", program, driver_version="550.54.15")
    assert "driver on your system is too old (found version 12040)" in done.stderr
    assert done.stdout == (
        "False cluster.device = cuda: this machine has 2 GPUs (NVIDIA H200), but driver 550.54.15 is too old: CUDA 13 "
        "of torch needs driver 580.65.06 or newer; update the driver. To leave them unused, set cluster.device=cpu in "
        "the environment of launch/setup.sh cpu.\n"
    )


# One line a finding.
WIDE = {"COLUMNS": "250"}


def test_an_old_driver_is_a_fault_of_doctor(on_devices: Run) -> None:
    done = on_devices("-m", "megarl", "doctor", driver_version="550.54.15", variables=WIDE)
    assert "driver 550.54.15 is too old" in done.stdout + done.stderr
    assert done.returncode != 0


def test_doctor_names_the_devices(on_devices: Run) -> None:
    done = on_devices("-m", "megarl", "doctor", count=4, variables=WIDE)
    assert "4: NVIDIA H200, 140 GiB, sm_90; driver 580.95.05" in done.stdout, done.stdout + done.stderr


def test_the_memory_limit_is_that_of_the_file(on_devices: Run) -> None:
    program = """
import torch
held = torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
try:
    torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    print(error)
"""
    done = on_devices("-c", program, memory_bytes=8 << 30)
    assert "8.00 GiB of which 2.50 GiB is free" in done.stdout, done.stdout + done.stderr


def test_products_of_fp8_are_left_out_on_an_older_gpu(on_devices: Run, tmp_path: Path) -> None:
    """The other ceilings are measured."""
    program = ROOT / "tools/bench/quarter/ceiling_items.py"
    options = ("--items", "ceilings=5", "--size", "tiny", "--work", str(tmp_path), "--budget-seconds", "500")
    done = on_devices(str(program), *options, count=1, compute_capability="8.0")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines[-1] == {"end": "ceilings", "status": "done"}, done.stdout + done.stderr
    assert {line["metric"] for line in lines if "metric" in line} >= {"gemm", "copy", "host_to_device", "page_locking"}
    [left_out] = [line for line in lines if "left_out" in line]
    assert left_out["left_out"] == ["fp8_gemm"] and "8.9" in left_out["why"]
