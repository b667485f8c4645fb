"""The table of the matrix: what a cell shows, and that nothing failed or missing passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.families.registry import FAMILIES
from tools import matrix
from tools.checks import families
from tools.matrix import Cell, cells

LOG = Path("next-qwen3.log")


def row(proof: str, found: float, limit: float = 1e-5) -> dict[str, Any]:
    return {"proof": proof, "found": found, "limit": limit, "met": found <= limit}


def test_a_cell_is_the_worst_row_of_its_proof() -> None:
    rows = [row("log-probs", 4e-7), row("log-probs, bfloat16", 0.006, 0.009), row("engine", 1e-6), row("engine", 3e-6)]
    rows.append({"proof": "drafts", "layout": "refused: no such layer", "found": "-", "limit": "-"})
    assert cells(rows, ("log-probs", "engine", "drafts"), LOG) == {
        "drafts": Cell("refused: no such layer", True),
        "log-probs": Cell("4e-07 ok", True),
        "log-probs, bfloat16": Cell("0.006 ok", True),
        "engine": Cell("3e-06 ok", True),
    }


def test_a_failed_or_missing_proof_is_not_passed() -> None:
    rows = [row("log-probs", 4e-7), row("log-probs, bfloat16", 0.0467, 0.0233)]
    found = cells(rows, ("log-probs", "reshard"), LOG)
    assert found["log-probs, bfloat16"] == Cell("FAILS (0.047, limit 0.023)", False)
    assert not found["reshard"].met and str(LOG) in found["reshard"].text


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1)])
def test_the_exit_code_is_that_of_the_worst_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, expected: int
) -> None:
    def guards(python: Path, log: Path, *arguments: str) -> int:
        log.write_text(f"{'1 failed, ' * code}57 passed, 16 skipped in 6.04s\n")
        return code

    monkeypatch.setattr(matrix, "make_environment", lambda name: Path("python"))
    monkeypatch.setattr(matrix, "run_in", guards)
    monkeypatch.setattr(matrix, "FAMILIES", ())
    monkeypatch.setattr(matrix, "LOGS", tmp_path)
    assert matrix.main([]) == expected
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"matrix: 2 cells, {2 * code} failed")
    assert [line.split()[:3] for line in lines[-3:-1]] == [[name, "-", "guards"] for name in matrix.INTERPRETERS]


def test_families_and_proofs_are_those_of_the_check() -> None:
    assert set(matrix.FAMILIES) <= FAMILIES.keys() and tuple(families.PROOFS) == matrix.PROOFS


def test_each_version_set_has_a_file() -> None:
    assert {len(matrix.versions(name)) for name in matrix.INTERPRETERS} <= {3, 4}
