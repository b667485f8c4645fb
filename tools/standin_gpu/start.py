"""Put the host's kernels in the place of CUDA's, in each process of the stand-in's environment.

A .pth file of the environment imports this module at the start of Python. Kernels are registered right after the import
of the library that declares their operators.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

AFTER_IMPORT = {
    "torch": "after_torch",
    "triton.runtime.interpreter": "after_interpreter",
    "vllm._C_stable_libtorch": "after_vllm_kernels",
    "vllm.vllm_flash_attn._vllm_fa3_C": "after_flash_attention",
    "vllm.v1.sample.ops.topk_topp_sampler": "after_top_k",
    "vllm.v1.worker.gpu.sample.gumbel": "after_gumbel",
    "vllm.model_executor.warmup.jit_warmup_triton_helper": "after_warmup",
}
"""Functions of kernels.py, by the module that they follow."""


def after_import(module: ModuleType) -> None:
    """Register the kernels that follow a module's import."""
    if module.__name__ == "torch":
        module.ops.load_library(str(Path(sys.prefix) / "standin_gpu/libraries/libstandin_numerics.so"))
    # Imports torch, so it cannot be imported earlier.
    kernels = importlib.import_module("standin_gpu_kernels")
    getattr(kernels, AFTER_IMPORT[module.__name__])(module)


class Imports(importlib.abc.MetaPathFinder):
    """Find the modules of AFTER_IMPORT as Python does, and call `after_import` once each is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "transformer_engine.common":
            # It loads a library that computes with torch's kernels here, and (2.11) loads it before it imports torch.
            importlib.import_module("torch")
        if fullname not in AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            after_import(module)

        spec.loader.exec_module = execute_and_register
        return spec


if "STANDIN_GPU_STATE" in os.environ:
    sys.meta_path.insert(0, Imports())
