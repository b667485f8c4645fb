"""A device is chosen, never the outcome of a failure: a GPU that torch cannot use is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.groups import world
from megarl.platform import chosen_device, device
from megarl.platform.chosen_device import LEAST_DRIVERS, device_fault, driver_fault
from megarl.platform.visible_gpus import driver_version, installed_gpus
from megarl.types import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """#!/bin/bash
case "$*" in
    *driver_version*) printf '570.86.15\\n570.86.15\\n' ;;
    *) printf '81920, 9.0, NVIDIA H100\\n81920, 9.0, NVIDIA H100\\n' ;;
esac
"""

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rank's choice, and driver and GPUs looked at anew."""
    for name in (chosen_device.VARIABLE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for asked in (installed_gpus, driver_version):
        asked.cache_clear()
    yield
    for asked in (installed_gpus, driver_version):
        asked.cache_clear()


@pytest.fixture
def old_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs whose driver is older than the installed torch needs."""
    (tmp_path / "nvidia-smi").write_text(DRIVER)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("found", "cuda", "supported", "is_too_old"),
    [
        pytest.param("570.86.15", 13, None, True, id="by its version"),
        pytest.param("580.65.06", 13, None, False, id="the least"),
        pytest.param("570.86.15", 12, None, False, id="an older CUDA"),
        pytest.param("570.86.15", 13, 13, False, id="with a compatibility library"),
        pytest.param("580.65.06", 13, 12, True, id="its library is an older one"),
        pytest.param(None, 13, None, False, id="unknown"),
    ],
)
def test_a_driver_is_compared_with_the_least(found: str, cuda: int, supported: int | None, is_too_old: bool) -> None:
    fault = driver_fault(found, cuda, supported)
    assert (fault is not None) == is_too_old
    assert fault is None or (found in fault and LEAST_DRIVERS[cuda] in fault)


@without_gpu
@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_an_error(
    old_driver: None, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    fault = device.fault(choice)
    assert fault is not None and fault.startswith(f"cluster.device = {choice}: this machine has 2 GPUs (NVIDIA H100)")
    monkeypatch.setattr(chosen_device, "library_versions", lambda: {"CUDA": "13.0"})
    fault = device.fault(choice)
    assert fault is not None and "570.86.15" in fault and LEAST_DRIVERS[13] in fault
    # With a driver that is new enough torch's own reason is asked for.
    monkeypatch.setattr(chosen_device, "library_versions", lambda: {"CUDA": "12.8"})
    assert device_fault(choice) is None
    fault = device.fault(choice)
    assert fault is not None and "torch.cuda.init()" in fault
    monkeypatch.setenv(chosen_device.VARIABLE, choice)
    with pytest.raises(ConfigError, match=f"cluster.device = {choice}"):
        world.initialize(1.0)


@without_gpu
def test_a_cpu_is_chosen_by_name_or_where_no_gpu_is_visible(old_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.fault("cpu") is None and device.fault("auto") is not None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    installed_gpus.cache_clear()
    assert device.fault("auto") is None
    fault = device.fault("cuda")
    assert fault is not None and fault.startswith("cluster.device = cuda: no NVIDIA GPU")


def test_ranks_get_the_choice_and_those_for_the_cpu_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = device.rank_environment(1, "cpu")
    assert (made["MEGARL_DEVICE"], made["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    assert "VLLM_NO_USAGE_STATS" in device.rank_environment(1, "cuda")
    assert "CUDA_VISIBLE_DEVICES" not in device.rank_environment(1, "auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert device.current().type == "cuda"
    monkeypatch.setenv("MEGARL_DEVICE", "cpu")
    assert device.current().type == "cpu" and device.fault() is None


def test_setup_compares_with_the_same_driver() -> None:
    found = re.search(r'^least_driver="([0-9.]+)"$', (ROOT / "launch/setup.sh").read_text(), re.MULTILINE)
    assert found is not None and found[1] == LEAST_DRIVERS[13]
