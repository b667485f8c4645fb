"""Engines that sample while the trainer trains against turns, at the smallest size: rows and their measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check
from tools.runs import read_lines

pytestmark = pytest.mark.distributed


@pytest.mark.long
def test_both_ways_are_timed(tmp_path: Path) -> None:
    assert check.main(["overlap", "--size", "small", "--json", str(tmp_path / "rows.jsonl")]) == 0
    turns, ahead, colocated = read_lines(tmp_path / "rows.jsonl")
    assert (turns["way"], ahead["way"], colocated["way"]) == ("in turns", "one step ahead", "colocated")
    assert turns["prompts"] == ahead["prompts"] == 2
    assert ahead["speedup"] == pytest.approx(turns["step_seconds"] / ahead["step_seconds"])
    assert ahead["samples_per_second"] == pytest.approx(4 / ahead["step_seconds"])
    longer = max(turns["sampling_seconds"], turns["training_seconds"])
    assert 0 < longer < turns["step_seconds"]
    assert ahead["step_over_longer_side"] == pytest.approx(ahead["step_seconds"] / longer)
