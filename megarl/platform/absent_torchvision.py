"""Stand-in for torchvision on a machine without CUDA, so that vLLM 0.30 can import its Qwen3.5 models.

vLLM's file of Qwen3.5 imports transformers' image code, also for text alone, and importing torchvision. PyPI's
torchvision does not work with torch's build for CPUs. Text needs no function of it; a use of one raises ImportError.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class _Absent(ModuleType):
    """A module without contents."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{self.__name__}.{name}: torchvision is not installed; images are not supported")


def install() -> None:
    """Make torchvision importable if it is not installed. Without it, transformers' image code cannot be imported."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    for name in _MODULES:
        module = _Absent(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
