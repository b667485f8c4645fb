"""Files made to exhaust memory: a careful reader takes little, and a careless one is found."""

from __future__ import annotations

import json
import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest

from tests.hostile_files.formats import Format, list_formats
from tests.hostile_files.grown_files import GROWTHS, Reading, read_grown
from tests.hostile_files.mutated_files import SECONDS
from tools.runs import run_python

FEW = "status.json|^model: config.json|owners|manifest|tracker"


def read_named(shared: Path, folder: Path, name: str, growth: str, mebibytes: int) -> Reading | None:
    [format] = [format for format in list_formats(shared) if format.name == name]
    return read_grown(format, folder, growth, mebibytes << 20)


@pytest.mark.parametrize(
    ("name", "growth", "answer"),
    [
        ("run: status.json", "empty lists", "read"),
        ("run: metrics.jsonl", "rows of the sample", "read"),
        ("checkpoint: common.pt", "compressed", "its entries are compressed"),
        ("recipe (YAML)", "empty lists", "has more than 100000 values"),
    ],
)
def test_a_hostile_file_takes_little_memory(tmp_path: Path, name: str, growth: str, answer: str) -> None:
    reading = read_named(tmp_path / "shared", tmp_path / "files", name, growth, 8)
    assert reading is not None and reading.is_careful and answer in reading.answer, reading


def test_a_growth_that_does_not_fit_the_format_is_left_out(tmp_path: Path) -> None:
    assert read_named(tmp_path / "shared", tmp_path / "files", "model: config.json", "compressed", 1) is None


def make_json(folder: Path) -> Path:
    (folder / "a.json").write_text("{}")
    return folder / "a.json"


def read_carelessly(folder: Path, growth: str) -> Reading | None:
    """Read a grown file without any limit."""
    return read_grown(Format("a", "a", make_json, lambda path: json.loads(path.read_bytes())), folder, growth, 8 << 20)


def print_careless(folder: str) -> None:
    """Read files of several growths carelessly. Prints for each whether it was a fault, and whether it was careful."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        readings = [
            pool.apply(read_carelessly, (Path(folder, growth), growth)) for growth in ("empty lists", "keys", "numbers")
        ]
    print(json.dumps([[reading.is_fault, reading.is_careful] for reading in readings]))


def print_readings(folder: str, only: str, mebibytes: int) -> None:
    """Read each matching format after each growth, in a process forked for it. Prints the careless readings."""
    shared = Path(folder) / "shared"
    names = [format.name for format in list_formats(shared) if re.search(only, format.name)]
    num_readings, careless = 0, []
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for number, (name, growth) in enumerate((name, growth) for name in names for growth in GROWTHS):
            arguments = (shared, Path(folder) / str(number), name, growth, mebibytes)
            # A reader may hang in C code, where no signal ends it.
            reading = pool.apply_async(read_named, arguments).get(SECONDS + 60)
            if reading is not None and not reading.is_careful:
                careless.append([name, growth, *reading])
            num_readings += reading is not None
    print(json.dumps([num_readings, careless]))


def run_alone(call: str) -> Any:
    """Call a function of this module in a new process: a used one may have free memory, whose use does not count."""
    done = run_python("-c", f"from {__name__} import *; {call}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_careless_reader_is_found(tmp_path: Path) -> None:
    assert run_alone(f"print_careless({str(tmp_path)!r})") == [[False, False]] * 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("only", "mebibytes"), [(FEW, 1), pytest.param("", 16, marks=pytest.mark.timeout(5000))], ids=["few", "all"]
)
def test_every_format_takes_every_growth(tmp_path: Path, only: str, mebibytes: int) -> None:
    num_readings, careless = run_alone(f"print_readings({str(tmp_path)!r}, {only!r}, {mebibytes})")
    assert careless == [] and num_readings >= 38
