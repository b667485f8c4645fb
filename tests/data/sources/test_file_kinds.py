"""Compressed data files, and kinds of files that an error names because they are not read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from megarl.data.reader import read_records
from megarl.data.sources import compressed
from megarl.data.sources.rows import data_files
from megarl.types import DataError

RECORDS = [{"prompt": f"say {n}", "answer": str(n)} for n in (2, 3, 5)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst", ".json.gz", ".JSONL.GZ"])
@pytest.mark.parametrize("parts", [1, 2], ids=["one part", "two parts"])
def test_compressed_lines_are_read_with_their_numbers(tmp_path: Path, ending: str, parts: int) -> None:
    compress: Callable[[bytes], bytes] = zstd if ending.endswith(".zst") else gzip.compress
    path = tmp_path / f"data{ending}"
    # Programs that compress in parallel write several parts.
    path.write_bytes(b"".join(compress(part) for part in ([LINES] if parts == 1 else [LINES[:40], LINES[40:]])))
    assert [(record.line, record.fields) for record in read_records(path)] == [*enumerate(RECORDS, start=1)]


def test_folders_and_splits_of_compressed_files(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(LINES))
    assert [file.name for file in data_files(f"test@{tmp_path}")] == ["test.jsonl.gz"]
    assert len(list(read_records(f"train@{tmp_path}"))) == 6
    (tmp_path / "train-00001-of-00002.jsonl.gz").unlink()
    with pytest.raises(DataError, match="missing: 00001"):
        data_files(f"train@{tmp_path}")


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_a_damaged_file_is_named(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / ("data.jsonl.gz" if compress is gzip.compress else "data.jsonl.zst")
    path.write_bytes(compress(LINES * 100)[:-9])
    with pytest.raises(DataError, match=r"data\.jsonl\.\w+, after line \d+: cannot be decompressed"):
        list(read_records(path))


def test_a_line_may_not_expand_without_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(LINES + b'{"prompt": "' + b"a" * (1 << 21)))
    with pytest.raises(DataError, match="line 4: has more than 1 MiB"):
        list(read_records(path))


TABLE = "prompt\tanswer\nsay 2\t2\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        pytest.param("a.jsonl", LINES.decode().encode("utf-16"), "is encoded as UTF-16", id="UTF-16"),
        pytest.param("a.jsonl", LINES.decode().encode("utf-16-le"), "is encoded as UTF-16", id="UTF-16 without mark"),
        pytest.param("a.json", LINES.decode().encode("utf-16-be"), "is encoded as UTF-16", id="UTF-16, big endian"),
        pytest.param("a.json", b"[]".decode().encode("utf-32"), "is encoded as UTF-32", id="UTF-32"),
        pytest.param("a.csv", "prompt,answer\n".encode("utf-16"), "is encoded as UTF-16", id="UTF-16 of a table"),
        pytest.param("a.jsonl.gz", gzip.compress("{}\n".encode("utf-16")), "is encoded as UTF-16", id="compressed"),
        pytest.param("a.tsv", TABLE.encode(), "separated by tabs", id="TSV"),
        pytest.param("a.tsv", b"prompt\nsay 2\n", "separated by tabs", id="TSV of one column"),
        pytest.param("a.txt", TABLE.encode(), "separated by tabs", id="TSV by its content"),
        pytest.param("a.csv", TABLE.encode(), "separated by tabs", id="TSV named CSV"),
        pytest.param("a.csv", b"\xef\xbb\xbfprompt;answer\n", "separated by semicolons", id="semicolons"),
        pytest.param("a.jsonl", gzip.compress(LINES), r"by gzip; .*\.jsonl\.gz", id="gzip without its ending"),
        pytest.param("a.csv", zstd(LINES), r"by Zstandard; .*\.jsonl\.zst", id="Zstandard without its ending"),
        pytest.param("a.csv.gz", gzip.compress(b"prompt,answer\n"), r"a compressed \.csv file", id="compressed CSV"),
        pytest.param("a.jsonl.bz2", bz2.compress(LINES), "by bzip2; decompress it", id="bzip2"),
        pytest.param("a.jsonl.xz", lzma.compress(LINES), "by xz; decompress it", id="xz"),
        pytest.param("a.json.gz", gzip.compress(b"[{}]"), "a compressed JSON list", id="compressed list"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        list(read_records(tmp_path / name))


def test_a_column_may_have_any_name_beside_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,a;b\nx,y\n")
    assert [record.fields for record in read_records(tmp_path / "a.csv")] == [{"prompt": "x", "a;b": "y"}]
