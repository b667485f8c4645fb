"""The device that a recipe chooses for its ranks (`cluster.device`), and why a machine cannot provide it.

torch is not imported: the checks before a start use this too. `platform.device` adds what torch itself answers.
"""

from __future__ import annotations

import ctypes
import os
from importlib.metadata import version

from packaging.version import Version

from megarl.platform.gpu_needs import library_versions
from megarl.platform.visible_gpus import driver_version, installed_gpus

VARIABLE = "MEGARL_DEVICE"
"""Environment variable of ranks: auto, cpu or cuda."""

LEAST_DRIVERS = {12: "525.60.13", 13: "580.65.06"}
"""The least driver for Linux by the major version of CUDA. Source: NVIDIA's CUDA Toolkit release notes."""


def chosen() -> str:
    """Return what the recipe chose for this rank; `auto` in a process that is not a rank."""
    return os.environ.get(VARIABLE, "auto")


def hide_gpus() -> None:
    """Hide the GPUs from this process if it is a rank for the CPU. Slurm and Ray give each task GPUs of their own."""
    if chosen() == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def device_fault(choice: str, can_use_cuda: bool | None = None) -> str | None:
    """Return why this machine does not have the device `choice` (auto, cpu, cuda); None where nothing is wrong.

    `can_use_cuda` is torch's answer, None where torch is not asked: then only what is certain without it counts.
    """
    if choice == "cpu" or can_use_cuda:
        return None
    shown = installed_gpus()
    if not shown:
        if choice == "auto":
            return None
        return (
            "cluster.device = cuda: no NVIDIA GPU is visible here; take a node with GPUs, or set cluster.device=auto."
        )
    reason = gpu_fault()
    if reason is None and can_use_cuda is None:
        return None
    reason = reason or (
        f"torch {version('torch')} cannot use them with driver {driver_version()}; "
        "`python -c 'import torch; torch.cuda.init()'` says why"
    )
    return (
        f"cluster.device = {choice}: this machine has {len(shown)} GPUs ({shown[0].name}), but {reason}. To leave them "
        "unused, set cluster.device=cpu in the environment of launch/setup.sh cpu."
    )


def gpu_fault() -> str | None:
    """Return why the installed torch cannot use this machine's GPUs, as far as versions decide it; else None."""
    cuda = library_versions().get("CUDA")
    if cuda is None:
        return f"torch {version('torch')} is a build for CPUs; run VENV=DIR launch/setup.sh gpu"
    return driver_fault(driver_version(), int(cuda.partition(".")[0]), supported_cuda())


def driver_fault(found: str | None, cuda: int, supported: int | None) -> str | None:
    """Return why a driver is too old for the CUDA of major version `cuda`; None where it is not, or is unknown.

    `supported` is the major version of CUDA that the loaded driver library has. It decides where it is known, because
    NVIDIA's compatibility package brings a newer library for an older kernel driver.
    """
    least = LEAST_DRIVERS.get(cuda)
    if found is None or least is None:
        return None
    is_too_old = Version(found) < Version(least) if supported is None else supported < cuda
    if not is_too_old:
        return None
    return f"driver {found} is too old: CUDA {cuda} of torch needs driver {least} or newer; update the driver"


def supported_cuda() -> int | None:
    """Return the major version of CUDA that the driver's library supports; None where it cannot be loaded."""
    try:
        library, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        error = library.cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return None
    return found.value // 1000 if error == 0 and found.value else None
