"""The device of this rank, and the world of `torch.distributed`."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch

from megarl.platform import chosen_device, rendezvous
from megarl.types import ConfigError


def current() -> torch.device:
    """The accelerator of this rank, or the CPU."""
    if chosen_device.chosen() != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def fault(choice: str | None = None) -> str | None:
    """Return why this machine does not have the device that a recipe chose; None where it does.

    `choice` is auto, cpu or cuda; that of this rank unless given. Without this check a GPU whose driver is too old for
    torch would silently become a CPU.
    """
    return chosen_device.device_fault(choice or chosen_device.chosen(), torch.cuda.is_available())


def require(choice: str | None = None) -> None:
    """Raise ConfigError for a `fault`."""
    if (found := fault(choice)) is not None:
        raise ConfigError(found)


PEAK_TFLOPS = {
    "B300": 2250.0, "GB300": 2500.0, "B200": 2250.0, "GB200": 2500.0, "H200": 989.0, "GH200": 989.0, "H100 NVL": 835.0,
    "H100 PCIe": 756.0, "H100": 989.0, "H800": 989.0, "H20": 148.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0,
    "L40": 181.0, "L4": 121.0, "A40": 150.0, "A10": 125.0, "RTX 6000 Ada": 364.0, "RTX 4090": 165.0,
}  # fmt: skip
"""Dense peak in bfloat16 and float16 by a part of the GPU's name, in TFLOP/s. Source: NVIDIA's data sheets."""


def peak_tflops(dtype: str) -> float | None:
    """Peak of this rank's device in TFLOP/s; None where it is not known: of a CPU, of other GPUs and types."""
    if not torch.cuda.is_available() or dtype not in ("bfloat16", "float16"):
        return None
    return peak_of(torch.cuda.get_device_name())


def peak_of(device_name: str) -> float | None:
    """The peak of a GPU by its name; the longest part that is in it as words of their own decides."""
    found = [part for part in PEAK_TFLOPS if re.search(rf"(?<![A-Za-z0-9]){re.escape(part)}(?![0-9])", device_name)]
    return PEAK_TFLOPS[max(found, key=len)] if found else None


def rank_environment(ranks_per_node: int, choice: str = "auto") -> dict[str, str]:
    """Environment variables to be set before a rank starts: device, cores, CUDA connections, cache folders.

    `choice` is `cluster.device`. Ranks for the CPU see no GPU.

    On a GPU vLLM and the Hub's library stay offline, as `platform.vllm_on_cpu` has it elsewhere, and CUDA_HOME is
    `cuda_toolkit`. Compiled kernels are cached in the user's folder, for a rank's temporary folder ends with it. On a
    CPU the C library shall copy blocks of more than half a MiB past the caches, which doubles their speed: in a virtual
    machine it takes the host's last-level cache for its own, and so never would.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // ranks_per_node)
    environment = {"OMP_NUM_THREADS": str(threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment[chosen_device.VARIABLE] = choice
    if choice == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if choice == "cuda" or (choice == "auto" and current().type == "cuda"):
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        own = {
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(caches, "megarl", "torchinductor"),
            # Models are folders when a rank starts; nothing is to be looked up or reported from a node.
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        environment |= {name: os.environ.get(name, value) for name, value in own.items()}
        if (toolkit := cuda_toolkit()) is not None:
            environment["CUDA_HOME"] = str(toolkit)
    else:
        environment["GLIBC_TUNABLES"] = os.environ.get(
            "GLIBC_TUNABLES", f"glibc.cpu.x86_non_temporal_threshold={1 << 19}"
        )
    return environment


def cuda_toolkit() -> Path | None:
    """The folder of the CUDA compiler that FlashInfer and vLLM compile kernels with at run time; None without one.

    CUDA_HOME or CUDA_PATH, else what launch/setup.sh made of the wheels that torch came with, else that of the nvcc on
    the PATH, or the usual folder. A folder that lacks what FlashInfer includes is passed over (`toolkit_notice`).
    """
    return next((folder for folder in _toolkit_folders() if not _missing_files(folder)), None)


def toolkit_notice() -> str | None:
    """Return a notice if the toolkit of CUDA_HOME or CUDA_PATH is passed over, with what it lacks; else None."""
    named = _named_toolkit()
    if named is None:
        return None
    variable, folder = named
    missing = _missing_files(folder)
    if not missing:
        return None
    other = cuda_toolkit()
    instead = "no other CUDA toolkit was found" if other is None else f"{other} is used instead"
    return f"{variable} = {folder}: lacks {', '.join(missing)}, which FlashInfer needs to compile kernels; {instead}."


def _toolkit_folders() -> Iterator[Path]:
    if (named := _named_toolkit()) is not None:
        yield named[1]
    yield Path(sys.prefix) / "cuda"
    if (nvcc := shutil.which("nvcc")) is not None:
        yield Path(nvcc).resolve().parents[1]
    yield Path("/usr/local/cuda")


def _named_toolkit() -> tuple[str, Path] | None:
    """Return the variable that names a toolkit and the folder; None where neither is set, or both are empty."""
    return next(((name, Path(os.environ[name])) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)), None)


# What the sources of FlashInfer 0.6.18 include. Toolkits of distributions often have the compiler without libraries.
_INCLUDED_HEADERS = ("cuda_runtime.h", "cublas_v2.h", "cublasLt.h", "curand.h", "curand_kernel.h", "nvrtc.h")


def _missing_files(toolkit: Path) -> list[str]:
    # An nvcc on the PATH may be a script that stands for one elsewhere.
    missing = [] if os.access(toolkit / "bin/nvcc", os.X_OK) else ["bin/nvcc"]
    return missing + [f"include/{name}" for name in _INCLUDED_HEADERS if not (toolkit / "include" / name).is_file()]


_WITH_A_MODEL = ("vllm.model_executor.layers.quantization.online.base",)


def forkable_imports(*modules: str) -> tuple[str, ...]:
    """Those of the modules that may be imported before ranks are forked: all on a CPU, none where there is a GPU.

    What an import may initialise there, CUDA above all, does not survive a fork. With them comes what vLLM imports
    only when it loads a model.
    """
    return (*modules, *_WITH_A_MODEL) if current().type == "cpu" else ()


def init_world(timeout_seconds: float) -> None:
    """Initialise `torch.distributed` from RANK and WORLD_SIZE at the run's rendezvous, unless that is done already.

    Raises ConfigError if this machine does not have the device that the recipe chose.
    """
    if torch.distributed.is_initialized():
        return
    require()
    device = current()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world_size = int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=rendezvous.store(world_size, timeout_seconds),
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
