"""The environment of ranks, where there is a GPU and where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.platform import device, numa


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No toolkit is named or on the PATH; the folder of the environment."""
    for name in ("CUDA_HOME", "CUDA_PATH", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(device.sys, "prefix", str(tmp_path / "venv"))
    return tmp_path / "venv"


def compiler(folder: Path) -> Path:
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    (folder / "include").mkdir()
    for name in ("cuda_runtime.h", "cublas_v2.h", "cublasLt.h", "curand.h", "curand_kernel.h", "nvrtc.h"):
        (folder / "include" / name).write_text("")
    return folder


def test_the_toolkit_is_the_users_or_that_of_the_wheels_or_of_the_path(
    bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not Path("/usr/local/cuda").exists():
        assert device.cuda_toolkit() is None
    compiler(tmp_path)
    header = tmp_path / "include/cuda_runtime.h"
    header.unlink()
    if not Path("/usr/local/cuda").exists():
        assert device.cuda_toolkit() is None, "a script in its place"
    header.write_text("")
    assert device.cuda_toolkit() == tmp_path
    # Of torch's own CUDA, whatever else there is.
    assert compiler(bare / "cuda") == device.cuda_toolkit()
    monkeypatch.setenv("CUDA_HOME", str(compiler(tmp_path / "own")))
    assert device.cuda_toolkit() == tmp_path / "own"
    assert device.toolkit_notice() is None
    monkeypatch.setenv("CUDA_HOME", "")
    assert device.cuda_toolkit() == bare / "cuda"
    assert device.toolkit_notice() is None


@pytest.mark.parametrize("lacking", ["bin/nvcc", "include/curand.h", "include/cublas_v2.h", "include/nvrtc.h"])
def test_a_named_toolkit_that_cannot_compile_loses_with_a_notice(
    bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: str
) -> None:
    named = compiler(tmp_path / "named")
    (named / lacking).unlink()
    monkeypatch.setenv("CUDA_HOME", str(named))
    notice = device.toolkit_notice()
    assert notice is not None and notice.startswith(f"CUDA_HOME = {named}: ") and lacking in notice
    if not Path("/usr/local/cuda").exists():
        assert device.cuda_toolkit() is None
    own = compiler(bare / "cuda")
    assert device.cuda_toolkit() == own
    notice = device.toolkit_notice()
    assert notice is not None and str(own) in notice


def test_ranks_on_a_gpu_stay_offline_and_find_the_compiler(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(bare / "cuda")
    monkeypatch.setattr(device, "current", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(device.chosen_device, "has_cuda_build", lambda: True)
    made = device.rank_environment(1)
    assert (made["CUDA_HOME"], made["HF_HUB_OFFLINE"], made["VLLM_NO_USAGE_STATS"]) == (str(bare / "cuda"), "1", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert device.rank_environment(1)["HF_HUB_OFFLINE"] == "0"
    assert numa.VARIABLE not in made and device.rank_environment(4, binds=True)[numa.VARIABLE] == "4"
    # One queue of kernels for all streams: only for trainers that split layers.
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in made
    assert device.rank_environment(1, orders_kernels=True)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_ranks_on_the_cpu_need_no_compiler(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(bare / "cuda")
    monkeypatch.setattr(device, "current", lambda: torch.device("cpu"))
    names = {"OMP_NUM_THREADS", "GLIBC_TUNABLES", "MEGARL_DEVICE"}
    assert device.rank_environment(1, binds=True, orders_kernels=True).keys() == names
