"""The threat model names tests that exist, and each of its rows has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / ".github/SECURITY.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def missing_tests(page: str) -> list[str]:
    """Return the tests that a page names and that do not exist."""
    found = []
    for file, name in NAMED.findall(page):
        path = ROOT / "tests" / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        if name not in names or not name.startswith("test_"):
            found.append(f"{file}::{name}")
    return found


def test_each_threat_has_tests_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 12
    assert [row.split("|")[1].strip() for row in rows if not NAMED.search(row.split("|")[4])] == []
    assert missing_tests(page) == []
    assert len(page.split()) <= 1200, "one page"


def test_a_test_that_is_gone_is_found() -> None:
    gone = (
        "files/test_atomic.py::test_gone",
        "files/test_gone.py::test_a",
        "architecture/test_security.py::missing_tests",
    )
    assert missing_tests(" ".join(f"`{name}`" for name in gone)) == list(gone)
