"""Reading a source of data with `data.streaming` takes at most 100 MB above the start, whatever its size.

Writes records, in row groups of 256 MB if they are Parquet. A process of its own reads and checks all of them once, as
a run does, and takes some in a shuffled order.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path

import pytest

from tests.resident_memory import peak_bytes, resident_bytes, restart_peak
from tools.runs import run_python

pytestmark = pytest.mark.end_to_end

_NUM_TAKEN = 64
_ROWS_AT_ONCE = 16
_ROW_GROUP_BYTES = 256 << 20


def text_of(number: int, num_bytes: int) -> str:
    """Text that does not compress, a function of the record's number."""
    return random.Random(number).randbytes(num_bytes // 2).hex()


def records(num_bytes: int, row_bytes: int) -> Iterator[dict[str, str]]:
    for number in range(num_bytes // row_bytes):
        text = text_of(number, row_bytes)
        yield {"prompt": text, "answer": hashlib.sha256(text.encode()).hexdigest()}


def write(path: Path, num_bytes: int, row_bytes: int) -> None:
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records(num_bytes, row_bytes))
        return
    pa, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    batch = _ROWS_AT_ONCE
    schema = pa.schema({"prompt": pa.string(), "answer": pa.string()})
    # A page, which is the least that can be read, has at least as many rows as are written at once: 1024 by default.
    with parquet.ParquetWriter(path, schema, write_batch_size=batch, use_dictionary=False) as writer:
        remaining = records(num_bytes, row_bytes)
        while rows := list(islice(remaining, _ROW_GROUP_BYTES // row_bytes)):
            writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=len(rows))


def read(path: Path) -> dict[str, float]:
    """Read the source as a run does. Returns the peak memory above the start, and counts of the records."""
    from megarl.data.reader import read_records
    from megarl.data.records import Record
    from megarl.data.streamed import Streamed

    if path.suffix == ".parquet":
        import_module("pyarrow.parquet")

    def make(index: int, record: Record) -> tuple[int, bool]:
        text = record.prompt()[0]["content"]
        return index, hashlib.sha256(text.encode()).hexdigest() == record.answer()

    # Imports that compile modules have a peak of their own, which could hide that of reading.
    restart_peak()
    start = resident_bytes()
    streamed: Streamed[tuple[int, bool]] = Streamed(read_records(path), make, None, folder=path.parent)
    places = random.Random(0).sample(range(len(streamed)), min(_NUM_TAKEN, len(streamed)))
    wrong = sum(streamed[place] != (place, True) for place in places)
    return {
        "peak_megabytes": (peak_bytes() - start) / 1e6,
        "records": len(streamed),
        "wrong": wrong,
    }


def print_measures(path: str) -> None:
    print(json.dumps(read(Path(path))))


@pytest.mark.parametrize(
    ("kind", "megabytes", "limit_megabytes"),
    [
        ("jsonl", 48, 30.0),
        ("parquet", 128, 100.0),
        pytest.param("parquet", 1024, 100.0, marks=pytest.mark.long),
    ],
)
def test_a_source_is_streamed(tmp_path: Path, kind: str, megabytes: int, limit_megabytes: float) -> None:
    path = tmp_path / f"data.{kind}"
    write(path, megabytes * 10**6, 64 << 10)
    # A process of its own: its peak memory is that of reading alone.
    done = run_python("-c", f"from {__name__} import print_measures; print_measures({str(path)!r})")
    assert done.returncode == 0, done.stderr
    measures = json.loads(done.stdout)
    assert measures["records"] == megabytes * 10**6 // (64 << 10) and measures["wrong"] == 0
    # It may be 0: memory that the imports freed serves the reading.
    assert measures["peak_megabytes"] <= limit_megabytes, measures
