"""The smallest recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

SMALL = """
name: small
loop: rl
model: {path: m}
data: {train: t.jsonl}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(SMALL)
    return path
