"""Damaged and hostile files of every format: each is read or refused, and nothing in them runs."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
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


def test_a_reader_that_is_too_slow_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader handles all usual errors, time-outs of the system among them."""

    def read(path: Path) -> None:
        with suppress(Exception):
            time.sleep(30)

    monkeypatch.setattr(fuzz, "TRACED_SECONDS", 1)
    row = fuzz.row_of(fuzz.Format("a", "a", _number, read), tmp_path / "files", 1, 0)
    assert not row["met"] and "takes more than 1 s" in row["fault"]


def _number(folder: Path) -> Path:
    (folder / "a.txt").write_bytes(b"7")
    return folder / "a.txt"


def test_time_is_measured_without_tracing_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(fuzz, "time", SimpleNamespace(monotonic=lambda: now))

    def read(path: Path) -> None:
        nonlocal now
        now += 100.0 if tracemalloc.is_tracing() else 2.0

    row = fuzz.row_of(fuzz.Format("a", "a", _number, read), tmp_path / "files", 3, 0)
    assert row["met"] and row["longest s"] == 2.0, row


def test_a_reader_that_loses_the_time_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(fuzz, "time", SimpleNamespace(monotonic=lambda: now))

    def read(path: Path) -> None:
        nonlocal now
        now += 2.0 if tracemalloc.is_tracing() else 2.0 + fuzz.SECONDS

    row = fuzz.row_of(fuzz.Format("a", "a", _number, read), tmp_path / "files", 1, 0)
    assert not row["met"] and f"more than {fuzz.SECONDS} s" in row["fault"]


def _refuse(text: str) -> None:
    raise DataError(text)
