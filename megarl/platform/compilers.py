"""The compilers that Triton and FlashInfer need when an engine starts, tried beforehand on a line of code each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

_SECONDS = 120.0
_EXTENSION = "#include <Python.h>\n"
_KERNEL = "#include <cub/cub.cuh>\n"
_CCCL = ("cub", "libcudacxx/include", "thrust")
"""Folders of headers in FlashInfer's copy of CCCL, in the order of its own builds (jit/env.py of 0.6.18)."""


def extension_fault() -> str | None:
    """Return why Triton cannot build an extension of Python here, with the package to install; None where it can."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    compiler = c_compiler()
    if compiler is None:
        return "no C compiler (gcc, clang or $CC); install one: apt-get install gcc g++, or dnf install gcc gcc-c++"
    headers = sysconfig.get_paths()["include"]
    if not (Path(headers) / "Python.h").is_file():
        return f"{headers} has no Python.h; install it: apt-get install {python}-dev, or dnf install {python}-devel"
    command = [compiler, "-shared", "-fPIC", f"-I{headers}", "-o"]
    error = _compile_error(_EXTENSION, "extension.c", command, "extension.so")
    if error is None:
        return None
    return (
        f"{compiler} cannot build an extension of Python ({error}); install compiler and headers: apt-get install gcc "
        f"libc6-dev {python}-dev, or dnf install gcc glibc-devel {python}-devel"
    )


def c_compiler() -> str | None:
    """Return the C compiler that Triton chooses (runtime/build.py of 3.7): $CC, else gcc, else clang."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def toolkit_fault(toolkit: Path) -> str | None:
    """Return why a CUDA toolkit cannot compile FlashInfer's kernels; None where it can, or FlashInfer is missing.

    FlashInfer's headers refuse a compiler of another CUDA version than the runtime's headers. Its kernels are compiled
    when an engine starts, minutes into a run; the preprocessor finds it out in seconds and needs no GPU.
    """
    found = find_spec("flashinfer")
    if found is None or found.origin is None:
        return None
    headers = Path(found.origin).parent / "data/cccl"
    includes = [f"-I{headers / folder}" for folder in _CCCL]
    command = [str(toolkit / "bin/nvcc"), "-std=c++17", "-arch=sm_90a", *includes, "-E", "-o"]
    error = _compile_error(_KERNEL, "kernel.cu", command, os.devnull)
    return error and f"{toolkit} cannot compile FlashInfer's kernels ({error})"


def _compile_error(source: str, name: str, command: list[str], output: str) -> str | None:
    """Return the compiler's first line with an error, or its last line; None if it compiled."""
    with TemporaryDirectory() as folder:
        (Path(folder) / name).write_text(source)
        try:
            done = subprocess.run(
                [*command, output, name], cwd=folder, capture_output=True, text=True, timeout=_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    named = next((line for line in lines if "error" in line), None)
    return named or (lines[-1] if lines else f"exit code {done.returncode}")
