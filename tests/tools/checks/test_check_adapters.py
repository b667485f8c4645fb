"""The smallest part of the check of adapters: reasoning-gym, which needs no environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check
from tools.runs import read_lines


@pytest.mark.long
@pytest.mark.distributed
def test_reasoning_gym_trains_for_two_steps(tmp_path: Path) -> None:
    assert check.main(["adapters", "--size", "small", "--json", str(tmp_path / "rows.jsonl")]) == 0
    [row] = read_lines(tmp_path / "rows.jsonl")
    assert row["adapter"] == "reasoning_gym" and row["errors"] == 0
