"""Reading a source of data with `data.streaming` takes at most 100 MB above the start, whatever its size.

Writes records, in row groups of 256 MB if they are Parquet. A process of its own reads and checks all of them once, as
a run does, and takes some in a shuffled order. The row fails above the limit, or if a record is not what was written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.resident_memory import peak_bytes
from tools.runs import output_end, run_python

DURATION = {"small": "1 s", "full": "5 s; --mb sets the size"}
SMALL = {"kind": "jsonl", "mb": 48, "limit_mb": 30.0}
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
        made = records(num_bytes, row_bytes)
        while rows := list(islice(made, _ROW_GROUP_BYTES // row_bytes)):
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

    start = peak_bytes()
    begun = time.monotonic()
    streamed: Streamed[tuple[int, bool]] = Streamed(read_records(path), make, None, folder=path.parent)
    seconds = time.monotonic() - begun
    places = random.Random(0).sample(range(len(streamed)), min(_NUM_TAKEN, len(streamed)))
    wrong = sum(streamed[place] != (place, True) for place in places)
    return {
        "peak_mb": (peak_bytes() - start) / 1e6,
        "records": len(streamed),
        "wrong": wrong,
        "megabytes_per_second": path.stat().st_size / 1e6 / seconds,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mb", type=int, default=128)
    parser.add_argument("--kind", choices=["jsonl", "parquet"], default="parquet")
    parser.add_argument("--limit-mb", type=float, default=100.0)
    parser.add_argument("--rows-kb", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where the source is written; default: a temporary folder")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder).absolute() / f"data.{options.kind}"
        write(path, options.mb * 10**6, options.rows_kb << 10)
        # A process of its own: its peak memory is that of reading alone.
        done = run_python("-m", "tools.checks.streaming", path)
        if done.returncode:
            raise SystemExit(output_end(done))
        found = json.loads(done.stdout)
        met = found["peak_mb"] <= options.limit_mb and found["wrong"] == 0
        yield {"kind": options.kind, "megabytes": path.stat().st_size / 1e6, **found, "met": met}


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1]))))
