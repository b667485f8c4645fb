"""The device of this rank (GPU or CPU), and the environment variables that select it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.platform import chosen_device, numa
from megarl.types import ConfigError

# Functions import torch themselves: a start needs the ranks' environment before torch is loaded.
if TYPE_CHECKING:
    import torch


def current() -> torch.device:
    import torch

    if chosen_device.read_choice() != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def fault(choice: str | None = None) -> str | None:
    """Return why this machine cannot provide the device that a recipe chooses; None: it can.

    `choice` is auto, cpu or cuda; None: this rank's choice. Without this check, the CPU would silently replace a GPU
    whose driver is too old.
    """
    import torch

    return chosen_device.device_fault(choice or chosen_device.read_choice(), torch.cuda.is_available())


def require(choice: str | None = None) -> None:
    """Raise ConfigError if this machine cannot provide the device `choice` (auto, cpu, cuda; None: this rank's)."""
    if (reason := fault(choice)) is not None:
        raise ConfigError(reason)


PEAK_TFLOPS = {
    "B300": 2250.0, "GB300": 2500.0, "B200": 2250.0, "GB200": 2500.0, "H200": 989.0, "GH200": 989.0, "H100 NVL": 835.0,
    "H100 PCIe": 756.0, "H100": 989.0, "H800": 989.0, "H20": 148.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0,
    "L40": 181.0, "L4": 121.0, "A40": 150.0, "A10": 125.0, "RTX 6000 Ada": 364.0, "RTX 4090": 165.0,
}  # fmt: skip
"""Dense peak performance in bfloat16 and float16, in TFLOP/s, by part of the GPU's name. Source: NVIDIA's data
sheets.
"""


def peak_tflops(dtype: str) -> float | None:
    """Return the peak performance of this rank's device in TFLOP/s; None: unknown (CPUs, other GPUs, other types)."""
    import torch

    if not torch.cuda.is_available() or dtype not in ("bfloat16", "float16"):
        return None
    return peak_of(torch.cuda.get_device_name())


def peak_of(device_name: str) -> float | None:
    """Return a GPU's peak performance in TFLOP/s by its name; None: unknown. The longest matching entry decides."""
    # Match whole words: "L4" must not match "L40S", nor "A10" "A100".
    matches = [part for part in PEAK_TFLOPS if re.search(rf"(?<![A-Za-z0-9]){re.escape(part)}(?![0-9])", device_name)]
    return PEAK_TFLOPS[max(matches, key=len)] if matches else None


def rank_environment(
    ranks_per_node: int, choice: str = "auto", binds: bool = False, *, orders_kernels: bool = False
) -> dict[str, str]:
    """Return the environment variables for a rank's start: device, cores, CUDA connections, cache folders.

    `choice` is `cluster.device`. `binds`: ranks on GPUs are bound to NUMA nodes. `orders_kernels`: a GPU starts the
    kernels of all streams in the order of their launch. Ranks on the CPU see no GPU. On a GPU, CUDA_HOME is
    `cuda_toolkit`, and vLLM and the Hugging Face Hub library stay offline (on a CPU by `cpu.vllm_patches`).
    """
    num_threads = max(1, len(os.sched_getaffinity(0)) // ranks_per_node)
    environment = {"OMP_NUM_THREADS": str(num_threads)}
    environment[chosen_device.VARIABLE] = choice
    if choice == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if choice == "cuda" or (choice == "auto" and not _uses_cpu()):
        cache_folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        defaults = {
            # The default is in a temporary folder, but a rank's temporary folder is removed with the rank.
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(cache_folder, "megarl", "torchinductor"),
            # When a rank starts, its models are local folders: nothing needs to go online.
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        environment |= {name: os.environ.get(name, value) for name, value in defaults.items()}
        if orders_kernels:
            environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if binds:
            environment[numa.VARIABLE] = str(ranks_per_node)
        if (toolkit := cuda_toolkit()) is not None:
            environment["CUDA_HOME"] = str(toolkit)
    else:
        # Copy blocks above 512 KiB past the CPU caches: these copies take half the time. In a virtual machine, the C
        # library takes the host's last-level cache for its own, and never does so by itself.
        environment["GLIBC_TUNABLES"] = os.environ.get(
            "GLIBC_TUNABLES", f"glibc.cpu.x86_non_temporal_threshold={1 << 19}"
        )
    return environment


def cuda_toolkit() -> Path | None:
    """Return the CUDA toolkit with which FlashInfer and vLLM compile kernels at run time, or None.

    Candidates, in order: CUDA_HOME or CUDA_PATH, the folder that launch/setup.sh makes from torch's wheels, the folder
    of the nvcc on the PATH, /usr/local/cuda. Folders lacking files for FlashInfer are skipped (`toolkit_notice`).
    """
    return next((folder for folder in _toolkit_folders() if not _missing_files(folder)), None)


def toolkit_notice() -> str | None:
    """Return a notice about missing files of the toolkit in CUDA_HOME or CUDA_PATH, or None."""
    named_toolkit = _named_toolkit()
    if named_toolkit is None:
        return None
    variable, folder = named_toolkit
    missing_files = _missing_files(folder)
    if not missing_files:
        return None
    fallback = cuda_toolkit()
    fallback_text = "no other CUDA toolkit was found" if fallback is None else f"{fallback} is used instead"
    return (
        f"{variable} = {folder}: lacks {', '.join(missing_files)}, which FlashInfer needs to compile kernels; "
        f"{fallback_text}."
    )


def _toolkit_folders() -> Iterator[Path]:
    if (named := _named_toolkit()) is not None:
        yield named[1]
    yield Path(sys.prefix) / "cuda"
    if (nvcc := shutil.which("nvcc")) is not None:
        yield Path(nvcc).resolve().parents[1]
    yield Path("/usr/local/cuda")


def _named_toolkit() -> tuple[str, Path] | None:
    """Return the variable that names a CUDA toolkit, and the toolkit's folder; None: neither CUDA_HOME nor CUDA_PATH is
    set.
    """
    return next(((name, Path(os.environ[name])) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)), None)


# Headers included by FlashInfer 0.6.18. Toolkits of Linux distributions often have only the compiler.
_INCLUDED_HEADERS = ("cuda_runtime.h", "cublas_v2.h", "cublasLt.h", "curand.h", "curand_kernel.h", "nvrtc.h")


def _missing_files(toolkit: Path) -> list[str]:
    # The nvcc on the PATH may be a wrapper script for a toolkit elsewhere.
    missing = [] if os.access(toolkit / "bin/nvcc", os.X_OK) else ["bin/nvcc"]
    return missing + [f"include/{name}" for name in _INCLUDED_HEADERS if not (toolkit / "include" / name).is_file()]


# vLLM 0.30 imports these modules only with a model. It imports Ray to find out whether a task of Ray runs it.
_IMPORTED_WITH_MODELS = ("vllm.model_executor.layers.quantization.online.base", "ray")


def forkable_imports(*modules: str) -> tuple[str, ...]:
    """Return the modules to import before ranks are forked: none with a GPU, because CUDA does not survive a fork.

    On a CPU these are `modules`, and modules that vLLM imports only with a model.
    """
    return (*modules, *_IMPORTED_WITH_MODELS) if _uses_cpu() else ()


def _uses_cpu() -> bool:
    """Return whether this process uses the CPU. Does not import torch if it is a build for CPUs."""
    return not chosen_device.has_cuda_build() or current().type == "cpu"
