"""Import of Megatron-Core 0.18 and newer on a machine without Triton.

One file of these versions always imports Triton: the GPU kernels of the paged stash, a buffer for experts' activations.
megarl never enables the paged stash. PyTorch's build for CPUs has no Triton.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PAGED_STASH = "megatron.core.transformer.moe.ops.paged_stash"
"""Module of Megatron-Core that always imports Triton. Megatron-Core 0.16 lacks it."""


class _AbsentKernel:
    """Stand-in for a Triton kernel. Each launch raises ImportError."""

    def __init__(self, function: Any) -> None:
        self._name = function.__name__

    def __getitem__(self, grid: object) -> Any:
        raise ImportError(f"{PAGED_STASH}.{self._name} is a Triton kernel, but Triton is not installed")


def install() -> None:
    """Load Megatron's paged stash with kernels that cannot run. Call it before the first import of Megatron.

    Does nothing if Triton is installed, or if this Megatron has no paged stash.
    """
    if PAGED_STASH in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    megatron_spec = importlib.util.find_spec("megatron")
    folders = (megatron_spec and megatron_spec.submodule_search_locations) or ()
    module_names = PAGED_STASH.split(".")[1:]
    files = [file for folder in folders if (file := Path(folder, *module_names).with_suffix(".py")).is_file()]
    stash_spec = importlib.util.spec_from_file_location(PAGED_STASH, files[0]) if files else None
    if stash_spec is None or stash_spec.loader is None:
        return
    module = importlib.util.module_from_spec(stash_spec)
    triton: Any = ModuleType("triton")
    language: Any = ModuleType("triton.language")
    triton.jit, triton.language = _AbsentKernel, language
    # The kernels' annotations use this type.
    language.constexpr = object
    # Only during this import: Megatron, torch and vLLM also look for Triton, and must not find it.
    sys.modules |= {"triton": triton, "triton.language": language}
    try:
        stash_spec.loader.exec_module(module)
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]
    sys.modules[PAGED_STASH] = module
