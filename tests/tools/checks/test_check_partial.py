"""Partial rollouts against waiting, at the smallest size: the same completions in fewer engine steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check
from tools.checks import partial
from tools.runs import read_lines

pytestmark = pytest.mark.end_to_end


@pytest.mark.long
def test_partial_rollouts_take_fewer_engine_steps(tmp_path: Path) -> None:
    # So small a model spends its CPU seconds elsewhere. Their ratio is not asserted, and the exit code follows it.
    check.main(["partial", "--size", "small", "--json", str(tmp_path / "rows.jsonl")])
    rows = {row["measure"]: row for row in read_lines(tmp_path / "rows.jsonl")}
    assert rows["max length"]["wait"] > 3 * rows["median length"]["wait"]
    assert rows["engine_steps"]["ratio"] < 1, rows
    assert rows["share of several versions"]["park"] > 0, rows
    assert rows["largest difference of log-probs"]["park"] <= partial.MOST_GAP, rows
