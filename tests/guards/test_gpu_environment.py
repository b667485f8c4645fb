"""The CUDA environment on a machine without a GPU: a job of its own, `pytest -m gpu_environment` (8.6 GB, minutes).

GPU_VENV names one that `launch/setup.sh gpu` has made; without it one is made, and left, in the cache's folder.
`.github/workflows/gpu_environment.yml` runs it once a week.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megarl.platform.cuda_extensions import MODULES, has_driver

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_DRIVER = (
    "vllm", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.qwen3", "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.attention.backends.flash_attn", "vllm.distributed.device_communicators.cuda_communicator",
    "flashinfer", "transformer_engine", "transformer_engine.pytorch", "megatron.core",
    "megatron.core.extensions.transformer_engine", "megarl.engine.engine", "megarl.training.training_engine",
)  # fmt: skip
NEEDED_BYTES = 10 << 30
"""Free disk that the environment needs: 8.6 GB, and the files that its packages are unpacked into."""
PROGRAM = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
from megarl.platform.cuda_extensions import import_faults_of
print(import_faults_of(tuple(sys.argv[2:])))
"""

pytestmark = [pytest.mark.gpu_environment, pytest.mark.timeout(7200)]


def disk_fault(venv: Path, needed: int) -> str | None:
    """Return why a disk is too small for a new environment; None where it is not, or the environment is there."""
    there = next(folder for folder in (venv, *venv.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if (venv / "bin/python").exists() or free >= needed:
        return None
    return (
        f"{venv}: the CUDA environment needs {needed / 2**30:.0f} GiB, and {free / 2**30:.1f} GiB are free; free disk, "
        "name another disk by XDG_CACHE_HOME, or an existing environment by GPU_VENV"
    )


@pytest.fixture(scope="module")
def environment() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    venv = Path(os.environ.get("GPU_VENV", cache / "megarl/gpu_venv"))
    if "GPU_VENV" not in os.environ:
        if (fault := disk_fault(venv, NEEDED_BYTES)) is not None:
            pytest.fail(fault, pytrace=False)
        subprocess.run(
            ["bash", str(ROOT / "launch/setup.sh"), "gpu"], env={**os.environ, "VENV": str(venv)}, check=True
        )
    return venv


def test_all_that_needs_no_driver_is_imported(environment: Path, tmp_path: Path) -> None:
    asked = list(WITHOUT_DRIVER)
    if has_driver():
        asked += [module for modules in MODULES.values() for module in modules]
    command = [str(environment / "bin/python"), "-W", "ignore", "-c", PROGRAM, str(ROOT), *asked]
    # Some keep folders for temporary files that outlive them.
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True, env=environ)
    assert done.stdout.splitlines()[-1] == "{}", done.stdout


def test_flashinfers_headers_accept_the_compiler(environment: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from megarl.platform import compilers; "
        "print(compilers.find_spec('flashinfer') is not None, compilers.toolkit_fault(Path(sys.prefix) / 'cuda'))"
    )
    command = [str(environment / "bin/python"), "-c", program, str(ROOT)]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environ)
    assert done.stdout == "True None\n", done.stdout


def test_the_toolkit_of_the_wheels_compiles_and_links(environment: Path, tmp_path: Path) -> None:
    """As FlashInfer does it at run time."""
    source, toolkit = tmp_path / "kernel.cu", environment / "cuda"
    source.write_text(
        "#include <cuda.h>\n__global__ void k(float* x) { x[threadIdx.x] += 1.f; }\n"
        'extern "C" int run(float* x) { int n; k<<<1, 32>>>(x); cuDeviceGetCount(&n); return n; }\n'
    )
    compiled, library = tmp_path / "kernel.o", tmp_path / "kernel.so"
    nvcc = [str(toolkit / "bin/nvcc"), "-arch=sm_90a", "-c", "-Xcompiler", "-fPIC", "-o", str(compiled), str(source)]
    subprocess.run(nvcc, check=True, timeout=300)
    folders = [f"-L{toolkit / 'lib64'}", f"-L{toolkit / 'lib64/stubs'}"]
    subprocess.run(["g++", "-shared", str(compiled), *folders, "-lcudart", "-lcuda", "-o", str(library)], check=True)
    assert library.stat().st_size > 0
