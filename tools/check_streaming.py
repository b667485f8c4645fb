"""Stream a data source of some size and measure how much memory that takes, in a process of its own.

    python tools/check_streaming.py [--mb 128] [--kind jsonl|parquet] [--limit-mb 100] [--rows-kb 64]

Writes so many megabytes of records, in row groups of 256 MB where they are Parquet, reads and checks all of them once
as a run with data.streaming does, and takes some in a shuffled order. Exits with 1 where the peak memory of that is
more than the limit above the start, or a record is not what was written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

_NUM_TAKEN = 64
_ROWS_AT_ONCE = 16
_CHILD = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); sys.argv = sys.argv[2:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""A process of its own, which begins with nothing of this one's but where modules are found."""
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
    """Read the source as a run does; the peak memory above the start, in bytes, and the records."""
    from megarl.data.records import Record, read_records
    from megarl.data.streamed import Streamed

    if path.suffix == ".parquet":
        import_module("pyarrow.parquet")

    def make(index: int, record: Record) -> tuple[int, bool]:
        text = record.prompt()[0]["content"]
        return index, hashlib.sha256(text.encode()).hexdigest() == record.answer()

    start = _peak_bytes()
    begun = time.monotonic()
    streamed: Streamed[tuple[int, bool]] = Streamed(read_records(path), make, None, folder=path.parent)
    seconds = time.monotonic() - begun
    places = random.Random(0).sample(range(len(streamed)), min(_NUM_TAKEN, len(streamed)))
    wrong = sum(streamed[place] != (place, True) for place in places)
    return {
        "peak_mb": (_peak_bytes() - start) / 1e6,
        "records": len(streamed),
        "wrong": wrong,
        "megabytes_per_second": path.stat().st_size / 1e6 / seconds,
    }


def _peak_bytes() -> int:
    """The largest resident size of this process so far. getrusage would count that of its parent too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=128)
    parser.add_argument("--kind", choices=["jsonl", "parquet"], default="parquet")
    parser.add_argument("--limit-mb", type=float, default=100.0)
    parser.add_argument("--rows-kb", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where the source is written; default: a temporary folder")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.read:
        print(json.dumps(read(options.read)))
        return 0
    with TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / f"data.{options.kind}"
        write(path, options.mb * 10**6, options.rows_kb << 10)
        command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), __file__, "--read", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        print(
            f"{path.stat().st_size / 1e6:.0f} MB of {options.kind}, {found['records']:.0f} records: "
            f"{found['peak_mb']:.0f} MB above the start at most, {found['megabytes_per_second']:.0f} MB a second, "
            f"{found['wrong']:.0f} wrong"
        )
    return int(found["peak_mb"] > options.limit_mb or found["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
