"""The types of package and tools, by pyright; a test like the others, so that other tests run beside it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.types

ROOT = Path(__file__).resolve().parents[2]


# pyright takes 130 s of processor time, and took over 900 s where other programs used the machine too.
@pytest.mark.timeout(2400)
def test_types_hold() -> None:
    # Node collects garbage of 16 MB by default. pyright 1.1.414 takes a fifth more processor time with it.
    options = f"{os.environ.get('NODE_OPTIONS', '')} --max-semi-space-size=256"
    environment = os.environ | {"NODE_OPTIONS": options.strip()}
    done = subprocess.run(["pyright"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
