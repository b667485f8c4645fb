"""The rollout benchmark runs for real, in miniature; numbers of a tiny model meet no target, so none is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

BENCH = Path(__file__).resolve().parents[3] / "tools" / "bench"


@pytest.mark.long
def test_the_driver_needs_the_engine_steps_of_a_bare_loop(tiny_model: Callable[..., Path]) -> None:
    command = [sys.executable, str(BENCH / "rollout.py"), "--model", str(tiny_model(num_layers=1)), "--engines", "1"]
    command += ["--attempts", "12", "--slots", "4", "--new-tokens", "12", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = {line["metric"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert set(lines) == {f"rollout_{n}_turns_{unit}" for n in (1, 4) for unit in ("engine_steps", "cpu_seconds")}, done
    for num_turns in (1, 4):
        assert lines[f"rollout_{num_turns}_turns_engine_steps"]["met"], lines
