"""The smallest part of the check of judges: exact counts. The check itself measures the speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check
from tools.runs import read_lines

pytestmark = pytest.mark.end_to_end


def test_counts_are_exact(tmp_path: Path) -> None:
    assert check.main(["judge", "--size", "small", "--json", str(tmp_path / "rows.jsonl")]) == 0
    rows = {row["measure"].strip(): row for row in read_lines(tmp_path / "rows.jsonl")}
    assert rows["calls (server's count)"]["value"] >= 128 and rows["scores as given"]["value"] == 128


def test_a_server_that_never_gives_an_answer_is_refused() -> None:
    with pytest.raises(SystemExit, match="give less than 100"):
        check.main(["judge", "--errors", "50", "--hangs", "50", "--nonsense", "0"])
