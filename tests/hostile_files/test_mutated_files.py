"""Damaged and hostile files of every format: each is read or refused, and nothing in them runs."""

from __future__ import annotations

import pickle
import re
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.types import DataError
from tests.hostile_files import mutated_files
from tests.hostile_files.formats import Format, list_formats
from tests.hostile_files.mutated_files import read_mutations

SLOW = "recipe|tokenizer|checkpoint: (.metadata|metadata|common|.distcp)"
"""Formats that need half a second for a hostile file."""


@pytest.mark.parametrize(
    ("only", "mutations"),
    [
        pytest.param(f"^(?!.*({SLOW}))", 5, id="quick"),
        pytest.param(SLOW, 3, id="slow"),
        pytest.param("", 1000, id="all, 1000 times", marks=[pytest.mark.long, pytest.mark.timeout(10_000)]),
    ],
)
def test_each_file_is_read_or_refused(tmp_path: Path, only: str, mutations: int) -> None:
    formats = [format for format in list_formats(tmp_path / "shared") if re.search(only, format.name)]
    results = {
        format.name: read_mutations(format, tmp_path / str(number), mutations) for number, format in enumerate(formats)
    }
    assert {name: result.fault for name, result in results.items() if result.fault} == {}
    assert len(results) >= (7 if only == SLOW else 35)
    # A reader that skips everything would pass too.
    assert sum(result.num_refused for result in results.values()) > len(results)


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

    result = read_mutations(Format("a", "a", make, read), tmp_path / "files", 20)
    assert result.fault is not None and fault in result.fault


def test_a_reader_that_is_too_slow_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader handles all usual errors, time-outs of the system among them."""

    def read(path: Path) -> None:
        with suppress(Exception):
            time.sleep(30)

    monkeypatch.setattr(mutated_files, "TRACED_SECONDS", 1)
    result = read_mutations(Format("a", "a", _number, read), tmp_path / "files", 1)
    assert "takes more than 1 s" in (result.fault or "")


def _number(folder: Path) -> Path:
    (folder / "a.txt").write_bytes(b"7")
    return folder / "a.txt"


def test_time_is_measured_without_tracing_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(mutated_files, "time", SimpleNamespace(monotonic=lambda: now))

    def read(path: Path) -> None:
        nonlocal now
        now += 100.0 if tracemalloc.is_tracing() else 2.0

    result = read_mutations(Format("a", "a", _number, read), tmp_path / "files", 3)
    assert result.fault is None and result.longest_seconds == 2.0


def test_a_reader_that_loses_the_time_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(mutated_files, "time", SimpleNamespace(monotonic=lambda: now))

    def read(path: Path) -> None:
        nonlocal now
        now += 2.0 if tracemalloc.is_tracing() else 2.0 + mutated_files.SECONDS

    result = read_mutations(Format("a", "a", _number, read), tmp_path / "files", 1)
    assert f"more than {mutated_files.SECONDS} s" in (result.fault or "")


def _refuse(text: str) -> None:
    raise DataError(text)
