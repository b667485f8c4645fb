"""Sources that do not fit in memory: the memory of reading one does not grow with its size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check
from tools.runs import ROOT, read_lines, run_python

pytestmark = pytest.mark.end_to_end


@pytest.mark.parametrize(("kind", "size"), [("parquet", "full"), ("jsonl", "small")])
def test_a_source_is_streamed(tmp_path: Path, kind: str, size: str) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    rows = tmp_path / "rows.jsonl"
    assert check.main(["streaming", "--size", size, "--kind", kind, "--json", str(rows)]) == 0
    [row] = read_lines(rows)
    assert row["kind"] == kind and row["records"] > 0 and row["wrong"] == 0


def test_the_limit_is_held_to_by_the_command_from_any_folder(tmp_path: Path) -> None:
    arguments = ("streaming", "--kind", "jsonl", "--mb", "2", "--limit-mb", "-1")
    done = run_python(ROOT / "tools/check.py", *arguments, folder=tmp_path)
    assert done.returncode == 1 and "streaming: 1 rows, 1 failed" in done.stdout, done.stderr
