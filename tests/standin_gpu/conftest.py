"""Fixtures of the stand-in's tests. `launch/test.sh --cuda` starts them in its environment, on two H200."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.standin_gpu.run import read_devices

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="session")
def stand_in() -> None:
    """Without the stand-in nothing here can run: neither on a CPU nor on a GPU."""
    if "STANDIN_GPU_STATE" not in os.environ:
        pytest.exit("tests/standin_gpu need the stand-in: launch/test.sh --cuda", returncode=2)


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[str]]:
    """`run_ranks([command, ...], variables)` starts ranks 0, 1, ... and returns what each wrote, errors included."""

    def run(*command: str, size: int = 2, **variables: str) -> list[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "TMPDIR": str(tmp_path)}
        started = [
            subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **place, "OMP_NUM_THREADS": "1", "RANK": str(rank), **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            return [rank.communicate(timeout=500)[0] for rank in started]
        finally:
            for rank in started:
                rank.kill()

    return run


@pytest.fixture
def on_devices(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`on_devices([arguments of Python], memory_bytes=...)` runs a program on other devices than those of the tests."""

    def run(
        *arguments: str, variables: dict[str, str] | None = None, **properties: Any
    ) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "devices.json"
        file.write_text(json.dumps({**read_devices("h200"), **properties}))
        start = [sys.executable, str(ROOT / "tools/standin_gpu/run.py"), sys.prefix, "--devices", str(file), "--"]
        # Libraries keep temporary files that outlive them.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **(variables or {})}
        return subprocess.run([*start, sys.executable, *arguments], capture_output=True, text=True, env=environment)

    return run
