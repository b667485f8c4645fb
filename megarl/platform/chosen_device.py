"""Reads from `cluster.device` which device a rank uses, and checks that the machine has it.

Does not import torch, because the checks before a start use this module. `platform.device` also asks torch.
"""

from __future__ import annotations

import ctypes
import os
from importlib.metadata import version

from packaging.version import Version

from megarl.platform.gpu_needs import library_versions
from megarl.platform.visible_gpus import driver_version, installed_gpus

VARIABLE = "MEGARL_DEVICE"
"""Environment variable with the value of `cluster.device` for ranks: auto, cpu or cuda."""

LEAST_DRIVERS = {12: "525.60.13", 13: "580.65.06"}
"""Oldest usable Linux driver of NVIDIA, by major CUDA version. Source: NVIDIA's CUDA Toolkit release notes."""


def read_choice() -> str:
    """Return the device chosen by the recipe for this rank; `auto` in a process without a rank."""
    return os.environ.get(VARIABLE, "auto")


def has_cuda_build() -> bool:
    return "CUDA" in library_versions()


def device_fault(choice: str, can_use_cuda: bool | None = None) -> str | None:
    """Return why this machine cannot provide the device `choice` (auto, cpu, cuda); None: it can.

    `can_use_cuda` is torch's answer; None: report only problems that are certain without torch.
    """
    if choice == "cpu" or can_use_cuda:
        return None
    gpus = installed_gpus()
    if not gpus:
        if choice == "auto":
            return None
        return "cluster.device = cuda: no NVIDIA GPU is visible here; use a node with GPUs, or set cluster.device=auto."
    gpu_problem = gpu_fault()
    if gpu_problem is None and can_use_cuda is None:
        return None
    gpu_problem = gpu_problem or (
        f"torch {version('torch')} cannot use them with driver {driver_version()}; "
        "`python -c 'import torch; torch.cuda.init()'` prints the reason"
    )
    return (
        f"cluster.device = {choice}: this machine has {len(gpus)} GPUs ({gpus[0].name}), but {gpu_problem}. To leave "
        "them unused, set cluster.device=cpu in the environment of launch/setup.sh cpu."
    )


def gpu_fault() -> str | None:
    """Return why the installed torch cannot use this machine's GPUs; None: it can. Compares only versions."""
    cuda = library_versions().get("CUDA")
    if cuda is None:
        return f"torch {version('torch')} is a build for CPUs; run VENV=DIR launch/setup.sh gpu"
    return driver_fault(driver_version(), int(cuda.partition(".")[0]), supported_cuda())


def driver_fault(driver: str | None, cuda: int, supported: int | None) -> str | None:
    """Return why the driver version `driver` is too old for CUDA `cuda` (major version); None: new enough or unknown.

    `supported` is the CUDA version of the loaded driver library (major version). If known, it decides, because
    NVIDIA's compatibility package has a newer library for an older kernel driver.
    """
    least_driver = LEAST_DRIVERS.get(cuda)
    if driver is None or least_driver is None:
        return None
    is_too_old = Version(driver) < Version(least_driver) if supported is None else supported < cuda
    if not is_too_old:
        return None
    return f"driver {driver} is too old: CUDA {cuda} of torch needs driver {least_driver} or newer; update the driver"


def supported_cuda() -> int | None:
    """Return the major CUDA version that the driver's library supports; None: it cannot be loaded."""
    try:
        library, cuda_version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        error = library.cuDriverGetVersion(ctypes.byref(cuda_version))
    except (OSError, AttributeError):
        return None
    # The version is 1000 * major + 10 * minor (CUDA driver API, cuDriverGetVersion).
    return cuda_version.value // 1000 if error == 0 and cuda_version.value else None
