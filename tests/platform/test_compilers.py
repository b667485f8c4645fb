"""Compilers that cannot compile what engines need are found, with the package to install."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from megarl.platform import compilers

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
NVCC = """#!/bin/bash
cd "$(dirname "${@: -1}")"
echo "In file included from kernel.cu:1:" >&2
grep -q cub/cub.cuh kernel.cu && case "$*" in
    *data/cccl/cub*data/cccl/libcudacxx/include*) echo 'toolkit.h:41: error: #error "incompatible"' >&2; exit 1 ;;
esac
"""


def test_an_extension_is_built_with_the_compiler_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert compilers.extension_fault() is None


@pytest.mark.parametrize("lacking", ["compiler", "header", "sound compiler"])
def test_what_an_extension_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    monkeypatch.delenv("CC", raising=False)
    if lacking == "compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        package = "gcc"
    elif lacking == "header":
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        package = f"{PYTHON}-dev"
    else:
        broken = tmp_path / "cc"
        broken.write_text("#!/bin/sh\necho 'fatal error: stdlib.h: No such file' >&2\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CC", str(broken))
        package = "libc6-dev"
    fault = compilers.extension_fault()
    assert fault is not None and f"apt-get install {package}" in fault.replace("gcc libc6-dev", "libc6-dev")
    assert lacking != "sound compiler" or "stdlib.h" in fault


def test_a_toolkit_that_flashinfers_headers_refuse_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "toolkit/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    assert compilers.toolkit_fault(tmp_path / "toolkit") is None, "without FlashInfer"
    (tmp_path / "site/flashinfer").mkdir(parents=True)
    (tmp_path / "site/flashinfer/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    fault = compilers.toolkit_fault(tmp_path / "toolkit")
    assert fault is not None and 'error: #error "incompatible"' in fault
    nvcc.write_text("#!/bin/sh\n")
    assert compilers.toolkit_fault(tmp_path / "toolkit") is None
