"""Only the GPUs that a process may use count for memory and capability."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.platform.visible_gpus import Gpu, installed_gpu_gib, installed_gpus

DRIVER = """#!/bin/bash
case "$*" in
    *--id=1,2*) printf '81920, 9.0, NVIDIA H100 80GB HBM3\\n40960, 8.0, NVIDIA A100, 40GB\\n' ;;
    *--id=3*) printf '[N/A], [N/A], NVIDIA GB10\\n' ;;
    *--id=*) echo "No devices were found"; exit 6 ;;
    *) printf '8192, 6.1, GT\\n81920, 9.0, H100\\n40960, 8.0, A100\\n' ;;
esac
"""


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A display's card of 8 GiB before others of 80 and 40."""
    program = tmp_path / "nvidia-smi"
    program.write_text(DRIVER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    installed_gpus.cache_clear()
    yield
    installed_gpus.cache_clear()


@pytest.mark.parametrize(("visible", "gib"), [(None, 8.0), ("1, 2", 40.0), ("", None), ("-1", None)])
def test_the_smallest_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gib: float | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert installed_gpu_gib() == gib


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("1,2", [Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80.0), Gpu("NVIDIA A100, 40GB", (8, 0), 40.0)]),
        ("3", [Gpu("NVIDIA GB10", None, None)]),
        ("-1", []),
    ],
)
def test_each_with_its_compute_capability(monkeypatch: pytest.MonkeyPatch, visible: str, gpus: list[Gpu]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert list(installed_gpus()) == gpus
