"""Damaged and hostile files of every format: each is read or refused, and nothing in them runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.types import DataError
from tools import check
from tools.checks import fuzz
from tools.runs import read_lines

SLOW = "recipe|tokenizer|checkpoint: (.metadata|metadata|common|.distcp)"
"""Formats that need half a second for a hostile file."""


@pytest.mark.parametrize(
    ("only", "mutations"), [pytest.param(f"^(?!.*({SLOW}))", 5, id="quick"), pytest.param(SLOW, 3, id="slow")]
)
def test_each_file_is_read_or_refused(tmp_path: Path, only: str, mutations: int) -> None:
    rows = tmp_path / "rows.jsonl"
    status = check.main(["fuzz", "--mutations", str(mutations), "--only", only, "--json", str(rows)])
    found = read_lines(rows)
    assert status == 0, [row for row in found if not row["met"]]
    assert len(found) >= (7 if only == SLOW else 35)
    # A reader that skips everything would pass too.
    assert sum(row["refused"] for row in found) > len(found)


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        pytest.param(lambda path: int(path.read_bytes()), "ValueError", id="another error"),
        pytest.param(lambda path: bytearray(200 << 20), "of memory", id="memory"),
        pytest.param(lambda path: pickle.loads(path.read_bytes()), "", id="a pickle"),
        pytest.param(lambda path: _refuse("the file is damaged"), "does not name the file", id="no name"),
    ],
)
def test_a_reader_that_is_not_careful_is_found(tmp_path: Path, read: Callable[[Path], Any], fault: str) -> None:
    def make(folder: Path) -> Path:
        (folder / "a.txt").write_bytes(b"N." if fault == "" else b"7")
        return folder / "a.txt"

    row = fuzz.row_of(fuzz.Format("a", "a", make, read), tmp_path / "files", 20, 0)
    assert not row["met"] and fault in row["fault"]


def _refuse(text: str) -> None:
    raise DataError(text)
