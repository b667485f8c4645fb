"""Recognises unsupported data files by their first bytes, so that an error can name their kind."""

from __future__ import annotations

import re
from pathlib import Path

from megarl.data.sources.compressed import COMPRESSIONS, extension_of, first_bytes
from megarl.types import DataError

_FIRST_BYTES = 4096
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}
"""Names of compressions by the first bytes of a file."""
_READ_COMPRESSED = {"gzip": ".jsonl.gz", "Zstandard": ".jsonl.zst"}
_UTF32, _UTF16 = (b"\xff\xfe\0\0", b"\0\0\xfe\xff"), (b"\xff\xfe", b"\xfe\xff")
"""Byte-order marks."""
_BARE_UTF16 = re.compile(rb"[\x09-\x7e]\0|\0[\x09-\x7e]")
"""First character, in ASCII, of a text in UTF-16 without a byte-order mark."""
_NOT_LINES = (".csv", ".tsv", ".parquet", ".arrow", ".tar")
_DELIMITERS = {b"\t": "tabs", b";": "semicolons"}
_UNREAD_KINDS = (".ndjson", ".jl", ".jsonlines", ".tsv", ".tab", ".pq", ".feather", ".ipc", ".orc", ".avro", ".xlsx")
"""Endings of files that hold records, but are not read from a folder."""
_UNREAD_COMPRESSIONS = (".bz2", ".xz", ".lz4", ".br", ".zip")
_COMPRESSED_KINDS = (".jsonl", ".json", ".csv", ".parquet", ".arrow", *_UNREAD_KINDS)
_CONVERT = "convert it to JSON lines, Parquet, or CSV with commas"


def is_unread_data_file(path: Path) -> bool:
    """Return whether a file's name says that it holds records, in a format that is not read from a folder."""
    last, inner_suffix = path.suffix.lower(), path.with_suffix("").suffix.lower()
    if last in _UNREAD_COMPRESSIONS:
        return inner_suffix in _COMPRESSED_KINDS
    if last in COMPRESSIONS:
        return inner_suffix in (*_NOT_LINES, *_UNREAD_KINDS)
    return last in _UNREAD_KINDS


def refuse_other_text(path: Path) -> None:
    """Raise DataError for another encoding, another delimiter than commas, or a compression that the name hides."""
    file_start = first_bytes(path, _FIRST_BYTES)
    _refuse_compressed(path, file_start)
    encoding = "UTF-32" if file_start.startswith(_UTF32) else "UTF-16" if file_start.startswith(_UTF16) else None
    if encoding is None and _BARE_UTF16.match(file_start):
        encoding = "UTF-16"
    if encoding is not None:
        raise DataError(
            f"{path}: is encoded as {encoding}; save it as UTF-8, for example: "
            f"iconv -f {encoding} -t UTF-8 {path.name} > NEW_FILE"
        )
    if delimiter := _find_other_delimiter(path, file_start):
        raise DataError(f"{path}: its values are separated by {delimiter}; {_CONVERT}")


def _refuse_compressed(path: Path, first_bytes: bytes) -> None:
    inner_suffix = path.with_suffix("").suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    if inner_suffix in _NOT_LINES:
        raise DataError(
            f"{path}: is a compressed {inner_suffix} file, of which only JSON lines are read; decompress it"
        )
    compression = next(
        (compression for magic, compression in _COMPRESSED.items() if first_bytes.startswith(magic)), None
    )
    if compression is not None:
        as_lines = ""
        if compression in _READ_COMPRESSED:
            as_lines = f", or if it holds JSON lines, end its name with {_READ_COMPRESSED[compression]}"
        raise DataError(f"{path}: is compressed by {compression}; decompress it{as_lines}")


def _find_other_delimiter(path: Path, first_bytes: bytes) -> str | None:
    """Return the name of the delimiter in a table's first line if it is no comma, else None."""
    header = first_bytes.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
    # JSON lines begin with a brace, and a CSV header of one column has none of these characters.
    if header.startswith((b"{", b"[")) or (extension_of(path) == ".csv" and b"," in header):
        return None
    if path.suffix.lower() in (".tsv", ".tab"):
        return "tabs"
    return next((name for sign, name in _DELIMITERS.items() if sign in header), None)
