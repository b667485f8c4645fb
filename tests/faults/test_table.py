"""The table of faults: each row is there once, and its tests exist."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.faults.table import NUM_ROWS, ROWS, UNPROVED, Row
from tools import check
from tools.runs import read_lines

ROOT = Path(__file__).resolve().parents[2]


@cache
def functions_of(file: str) -> frozenset[str]:
    """Return the names of a file's functions."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_each_fault_has_one_row() -> None:
    counts = Counter([*(row.number for row in ROWS), *UNPROVED])
    assert counts == Counter(range(1, NUM_ROWS + 1))
    assert [row.number for row in ROWS] == sorted(row.number for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"row {row.number}")
def test_the_tests_of_a_row_exist(row: Row) -> None:
    assert row.proofs and row.cause and row.left
    for proof in row.proofs:
        file, _, name = proof.partition("::")
        assert name.startswith("test_") and name in functions_of(file), proof


def test_the_check_runs_the_tests_of_chosen_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    assert check.main(["faults", "--row", "35", "--row", "99", "--json", str(file)]) == 1
    found, unknown = read_lines(file)
    assert (found["row"], found["met"], found["problems"]) == (35, True, "-"), capsys.readouterr().out
    passed, _, run = found["tests"].partition(" of ")
    assert passed == run and int(run) > 3
    assert unknown == {"row": 99, "fault": "is not in the table", "met": False}
