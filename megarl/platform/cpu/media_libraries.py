"""torchvision, torchaudio and torchcodec on a machine without CUDA: hides broken ones, replaces a missing torchvision.

PyPI's builds of these libraries do not work with torch's build for CPUs. Yet transformers imports each installed one.
vLLM 0.30's module of Qwen3.5 imports transformers' image code even for text, and this code needs torchvision. Text
processing calls no function of torchvision. A call raises ImportError.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
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
    """A stand-in module. Access to a public attribute raises ImportError."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{self.__name__}.{name}: torchvision is not installed; images are not supported")


def hide_broken() -> None:
    """Hide torchvision, torchaudio and torchcodec if their import fails. Other libraries then treat them as missing.

    Call it before the first import of vLLM.
    """
    for library in ("torchvision", "torchaudio", "torchcodec"):
        if library in sys.modules or importlib.util.find_spec(library) is None:
            continue
        try:
            importlib.import_module(library)
        except Exception as error:  # torch raises RuntimeError or OSError for a library built for another torch.
            for name in [name for name in sys.modules if name.partition(".")[0] == library]:
                del sys.modules[name]
            # Python treats a module recorded as None as not existing.
            sys.modules[library] = None  # pyright: ignore[reportArgumentType]  (a documented value)
            logging.getLogger(__name__).warning("%s fails to import with this torch and is hidden: %s", library, error)


def provide_torchvision() -> None:
    """Make torchvision importable if it is missing or hidden."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in _MODULES:
        module = _Absent(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
