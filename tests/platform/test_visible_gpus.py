"""Which of a machine's GPUs are looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.platform.visible_gpus import installed_gpu_gib

DRIVER = """#!/bin/bash
case "$*" in
    *--id=1,2*) printf '81920\\n40960\\n' ;;
    *--id=*) echo "No devices were found"; exit 6 ;;
    *) printf '8192\\n81920\\n40960\\n' ;;
esac
"""


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A display's card of 8 GiB before others of 80 and 40."""
    program = tmp_path / "nvidia-smi"
    program.write_text(DRIVER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    installed_gpu_gib.cache_clear()
    yield
    installed_gpu_gib.cache_clear()


@pytest.mark.parametrize(("visible", "gib"), [(None, 8.0), ("1, 2", 40.0), ("", None), ("-1", None)])
def test_the_smallest_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gib: float | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert installed_gpu_gib() == gib
