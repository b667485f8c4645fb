"""Inputs of the stand-in's two scripts: each wrong one has a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.standin_gpu import build, run


@pytest.mark.parametrize(("name", "memory_bytes"), [("h100", 85520809984), ("h200", 150754820096)])
def test_devices_are_read(name: str, memory_bytes: int) -> None:
    found = run.read_devices(name, 4)
    assert found["memory_bytes"] == memory_bytes
    assert found["count"] == 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("memory_bytes", "80 GB", "memory_bytes = '80 GB': give a whole number from 1 on"),
        ("count", 0, "count = 0: give a whole number from 1 on"),
        ("count", 17, "count = 17: the stand-in has at most 16 devices"),
        ("name", "two\nlines", "name = .*: give a line of text"),
        ("compute_capability", "nine", "compute_capability = nine: write it as 9.0"),
        ("bandwidth", 1, "its fields must be name, count"),
    ],
)
def test_wrong_properties_are_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    file = tmp_path / "devices.json"
    file.write_text(json.dumps({**run.read_devices("h200"), field: value}))
    with pytest.raises(run.PropertyError, match=message):
        run.read_devices(str(file))


def test_unknown_devices_are_named() -> None:
    with pytest.raises(run.PropertyError, match=r"devices = b200: no such file; choose one of h100, h200, or a path"):
        run.read_devices("b200")


def test_an_environment_without_cuda_is_refused(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="not a Python environment"):
        build.build(tmp_path, tmp_path / "made")
    (tmp_path / "lib/python3.11/site-packages").mkdir(parents=True)
    with pytest.raises(build.BuildError, match=r"libtorch_cuda\.so is missing, so this is no CUDA environment"):
        build.build(tmp_path, tmp_path / "made")
