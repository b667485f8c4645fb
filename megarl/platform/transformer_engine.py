"""Checks that NVIDIA's Transformer Engine can be imported if it is installed.

A failing import is an error. Megatron-Core 0.16.1 imports it too. It also fails after most errors, but after an
ImportError it silently trains with other layers.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import MutableMapping
from importlib.util import find_spec

from megarl.platform.commands import run_command
from megarl.types import ConfigError

REMEDY = "run launch/setup.sh (in an offline bundle build_engine.sh), or uninstall transformer-engine"
"""Advice for a Transformer Engine whose import fails."""

_IMPORT_SECONDS = 120.0
"""Time limit in seconds for the import in a child process."""
# Transformer Engine 2.11 looks for CUDA's libraries in these folders. If one is empty, it searches the whole machine
# (`/**/lib*.so*`).
_TOOLKITS = tuple(f"{name}_{end}" for name in ("CUDA", "CUDNN", "NVRTC", "CURAND") for end in ("HOME", "PATH"))


def is_installed() -> bool:
    return find_spec("transformer_engine") is not None


def unset_empty_toolkits(environment: MutableMapping[str, str]) -> None:
    """Remove empty variables for CUDA folders, as set by `CUDA_HOME= megarl train`."""
    for name in _TOOLKITS:
        if environment.get(name) == "":
            del environment[name]


def require_importable() -> None:
    """Import Transformer Engine if it is installed. Raises ConfigError, with a remedy, if the import fails."""
    if not is_installed():
        return
    unset_empty_toolkits(os.environ)
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"Transformer Engine is installed but cannot be imported ({reason}); {REMEDY}.") from error


def import_fault() -> str | None:
    """Try the import in a child process. Returns why the installed Transformer Engine cannot be imported.

    None: it can be imported, or is not installed.
    """
    if not is_installed():
        return None
    command = [sys.executable, "-c", "import transformer_engine.pytorch"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    unset_empty_toolkits(environment)
    try:
        result = run_command(command, seconds=_IMPORT_SECONDS, environment=environment)
    except TimeoutError:
        return f"the import did not end within {_IMPORT_SECONDS:.0f} s"
    if result.returncode == 0:
        return None
    # A positive code is Python's: the traceback's last line names the error. A signal leaves no such line.
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines and result.returncode > 0 else f"its process ended with {result.returncode}"
