"""Checks of NVIDIA's Transformer Engine: whether it is installed, whether it can be imported.

An installed one that cannot be imported is an error: Megatron-Core imports it too and fails along with it, or, where
the failure is an ImportError, silently trains with other layers.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import MutableMapping
from importlib.util import find_spec

from megarl.types import ConfigError

REMEDY = "run launch/setup.sh, or uninstall transformer-engine"

_IMPORT_SECONDS = 120.0
# Where Transformer Engine looks for CUDA's libraries. An empty one makes it search the whole machine, `/**/lib*.so*`.
_TOOLKITS = tuple(f"{name}_{end}" for name in ("CUDA", "CUDNN", "NVRTC", "CURAND") for end in ("HOME", "PATH"))


def is_installed() -> bool:
    return find_spec("transformer_engine") is not None


def unset_empty_toolkits(environment: MutableMapping[str, str]) -> None:
    """Remove variables of CUDA's folders that are set to nothing, as by `CUDA_HOME= megarl train`."""
    for name in _TOOLKITS:
        if environment.get(name) == "":
            del environment[name]


def require_sound() -> None:
    """Import Transformer Engine where it is installed. Raises ConfigError, with the remedy, where that fails."""
    if not is_installed():
        return
    unset_empty_toolkits(os.environ)
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(f"Transformer Engine is installed but cannot be imported ({told}); {REMEDY}.") from error


def import_fault() -> str | None:
    """Why the installed Transformer Engine cannot be imported, tried in a process of its own.

    None where it can, or is not installed.
    """
    if not is_installed():
        return None
    command = [sys.executable, "-c", "import transformer_engine.pytorch"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    unset_empty_toolkits(environment)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return f"no end after {_IMPORT_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines and done.returncode > 0 else f"its process ended with {done.returncode}"
