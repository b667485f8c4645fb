"""The benchmark of the endpoint runs for real, in miniature. It checks its records itself; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "tools" / "bench"


@pytest.mark.long
def test_sessions_of_each_dialect_are_measured() -> None:
    command = [sys.executable, str(BENCH / "endpoint.py"), "--sessions", "4", "--rounds", "1", "--seconds", "0.5"]
    command += ["--rate", "40", "--turns", "2", "--dialects", "chat", "messages", "responses"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = list(map(json.loads, done.stdout.splitlines()))
    # A missed limit ends the benchmark with 1 too, so the lines show that it came to its end.
    assert [line["dialect"] for line in lines if line["metric"] == "endpoint_added_ms"] == [
        "chat", "messages", "responses",
    ], done.stderr  # fmt: skip
    assert all(line["value"] > 0 for line in lines)
