"""Files made to exhaust memory: a careful reader passes the check, a careless one does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.checks import large_files
from tools.runs import read_lines

ROOT = Path(__file__).resolve().parents[2]
CARELESS = """
import json, sys, types
from pathlib import Path
from tools.checks import large_files
from tools.checks.fuzz import Format

def make(folder):
    (folder / "a.json").write_text("{}")
    return folder / "a.json"

class Rows(list):
    send = list.append

formats = types.ModuleType("tools.fuzz_formats")
formats.formats = lambda shared: [Format("a", "a", make, lambda path: json.loads(path.read_bytes()))]
sys.modules["tools.fuzz_formats"] = formats
rows = Rows()
large_files.read(Path("unused"), Path(sys.argv[1]), "a", sys.argv[2], 8 << 20, rows)
print(json.dumps(rows[0]))
"""
"""Program that measures a reader without any limit, and prints the row."""


class Rows(list[Any]):
    """Takes the rows in place of a connection."""

    def send(self, row: Any) -> None:
        self.append(row)


def read(tmp_path: Path, format: str, growth: str, mib: int = 8) -> Any:
    rows: Any = Rows()
    (tmp_path / "shared").mkdir(exist_ok=True)
    large_files.read(tmp_path / "shared", tmp_path / growth, format, growth, mib << 20, rows)
    [row] = rows
    return row


@pytest.mark.parametrize(
    ("format", "growth", "answer"),
    [
        ("run: status.json", "empty lists", "read"),
        ("run: metrics.jsonl", "rows of the sample", "read"),
        ("checkpoint: common.pt", "compressed", "its entries are compressed"),
        ("recipe (YAML)", "empty lists", "has more than 100000 values"),
    ],
)
def test_a_hostile_file_takes_little_memory(tmp_path: Path, format: str, growth: str, answer: str) -> None:
    row = read(tmp_path, format, growth)
    assert row["met"] and answer in row["answer"] and row["peak MiB"] <= row["limit MiB"]


def test_a_growth_that_does_not_fit_the_format_has_no_row(tmp_path: Path) -> None:
    assert read(tmp_path, "model: config.json", "compressed") is None


@pytest.mark.parametrize("growth", ["empty lists", "keys", "numbers"])
def test_a_careless_reader_is_found(tmp_path: Path, growth: str) -> None:
    # In a new process: this one may have free memory, whose use does not count as growth.
    command = [sys.executable, "-c", CARELESS, tmp_path / "files", growth]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)
    assert not row["met"] and row["peak MiB"] > row["limit MiB"]


@pytest.mark.long
def test_the_check_reads_each_file_in_a_process(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    # In a process of its own: the fork server that starts the readers ends with it.
    command = [sys.executable, "tools/check.py", "large_files", "--size", "small", "--json", rows]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    found = read_lines(rows)
    assert len(found) >= 38 and {row["format"] for row in found} >= {"run: status.json", "manifest.json"}
