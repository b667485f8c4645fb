"""Load the CPU's kernels for CUDA tensors right after `import torch`, in each process of the stand-in's environment.

A .pth file of the environment imports this module at the start of Python.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_load(module: ModuleType) -> None:
            execute(module)
            module.ops.load_library(str(Path(sys.prefix) / "standin_gpu/libraries/libstandin_numerics.so"))

        spec.loader.exec_module = execute_and_load
        return spec


sys.meta_path.insert(0, _AfterTorch())
