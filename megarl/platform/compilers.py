"""Checks of the compilers that Triton and FlashInfer need at an engine's start: each compiles one line of code."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from megarl.files.private_folder import PrivateFolder
from megarl.platform.commands import run_command

_SECONDS = 120.0
"""Time limit in seconds for one compilation."""
_EXTENSION = "#include <Python.h>\n"
_KERNEL = "#include <cub/cub.cuh>\n"
_CCCL = ("cub", "libcudacxx/include", "thrust")
"""Folders of C++ headers in FlashInfer's copy of the CUDA library CCCL, in the order of its builds (jit/env.py of
0.6.18).
"""


def extension_fault() -> str | None:
    """Return why Triton cannot build a Python extension here, with the package to install; None: it can."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    compiler = c_compiler()
    if compiler is None:
        return "no C compiler found (gcc, clang, $CC); install one: apt-get install gcc g++, or dnf install gcc gcc-c++"
    headers = sysconfig.get_paths()["include"]
    if not (Path(headers) / "Python.h").is_file():
        return f"{headers} has no Python.h; install it: apt-get install {python}-dev, or dnf install {python}-devel"
    command = [compiler, "-shared", "-fPIC", f"-I{headers}", "-o"]
    error = _find_compile_error(_EXTENSION, "extension.c", command, "extension.so")
    if error is None:
        return None
    return (
        f"{compiler} cannot build a Python extension ({error}); install compiler and headers: apt-get install gcc "
        f"libc6-dev {python}-dev, or dnf install gcc glibc-devel {python}-devel"
    )


def c_compiler() -> str | None:
    """Return Triton's C compiler (runtime/build.py of 3.7): $CC, else gcc, else clang; None: there is none."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def toolkit_fault(toolkit: Path) -> str | None:
    """Return why a CUDA toolkit cannot compile FlashInfer's kernels; None: it can, or FlashInfer is not installed.

    FlashInfer's headers require the same CUDA version of compiler and runtime headers. The preprocessor finds a
    mismatch in seconds, an engine only minutes into a run.
    """
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return None
    headers = Path(spec.origin).parent / "data/cccl"
    includes = [f"-I{headers / folder}" for folder in _CCCL]
    # Stop after the preprocessor (-E): it already checks the versions in the headers.
    command = [str(toolkit / "bin/nvcc"), "-std=c++17", "-arch=sm_90a", *includes, "-E", "-o"]
    error = _find_compile_error(_KERNEL, "kernel.cu", command, os.devnull)
    return error and f"{toolkit} cannot compile FlashInfer's kernels ({error})"


def _find_compile_error(source: str, name: str, command: list[str], output: str) -> str | None:
    """Run a compiler. Returns the first line of its output with "error", else the last line; None: it succeeded."""
    with PrivateFolder() as folder:
        (folder / name).write_text(source)
        try:
            result = run_command([*command, output, name], seconds=_SECONDS, folder=str(folder))
        except OSError as error:
            return str(error)
    if result.returncode == 0:
        return None
    lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
    error_line = next((line for line in lines if "error" in line), None)
    return error_line or (lines[-1] if lines else f"exit code {result.returncode}")
