"""Stand-in for torchvision on a machine without CUDA, so that vLLM 0.30 can import its Qwen3.5 models.

vLLM's module of Qwen3.5 imports transformers' image code even if only text is processed, and the image code imports
torchvision. PyPI's torchvision does not work with torch's build for CPUs. Processing text calls no function of
torchvision. A call of one raises ImportError.
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
    """A stand-in module. Accessing a public attribute raises ImportError."""

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
