"""Lines of text files, plain or compressed by gzip (`.gz`) or Zstandard (`.zst`)."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from megarl.types import ConfigError, DataError

COMPRESSIONS = (".gz", ".zst")
"""Endings of readable compressed files."""
# A few bytes may expand to gigabytes. No record of a data set is as long as this.
MAX_LINE_BYTES = 1 << 28


def extension_of(path: Path) -> str:
    """Return a file's extension in lower case, with the compression's: `.jsonl.gz`."""
    last_suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() + last_suffix if last_suffix in COMPRESSIONS else last_suffix


def stem_of(path: Path) -> str:
    return path.name[: len(path.name) - len(extension_of(path))]


def first_bytes(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, decompressed. Raises DataError for a damaged compressed file."""
    with _open_decompressed(path) as file, _raise_damage_as_data_error(path):
        return file.read(size)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed.

    Raises DataError for a damaged compressed file, and for a line longer than MAX_LINE_BYTES.
    """
    if path.suffix.lower() not in COMPRESSIONS:
        with path.open("rb") as file:
            yield from file
        return
    num_lines = 0
    with _open_decompressed(path) as file:
        while True:
            with _raise_damage_as_data_error(path, num_lines):
                # One byte more than allowed: a line that fills it is too long.
                line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            num_lines += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}, line {num_lines}: has more than {MAX_LINE_BYTES >> 20} MiB; decompress the file to read "
                    "it"
                )
            yield line


@contextmanager
def _open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    ending = path.suffix.lower()
    if ending == ".gz":
        with gzip.open(path) as file:
            yield cast(IO[bytes], file)
    elif ending == ".zst":
        try:
            import pyarrow
        except ImportError:
            raise ConfigError(
                f"{path}: pyarrow is not installed, but .zst files need it; run launch/setup.sh, or decompress the file"
            ) from None
        # pyarrow's stream cannot be read line by line; BufferedReader can.
        with io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")) as file:
            yield file
    else:
        with path.open("rb") as file:
            yield file


@contextmanager
def _raise_damage_as_data_error(path: Path, num_lines: int = 0) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if path.suffix.lower() not in COMPRESSIONS:
            raise
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path}, after line {num_lines}: cannot be decompressed ({reason}); copy the file again"
        ) from None
