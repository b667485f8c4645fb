"""The types of package and tools, by pyright; a test like the others, so that other tests run beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.types

ROOT = Path(__file__).resolve().parents[2]


# pyright takes 100 s of a core, and other tests run beside it.
@pytest.mark.timeout(900)
def test_types_hold() -> None:
    done = subprocess.run(["pyright"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
