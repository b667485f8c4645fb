"""Files made to exhaust memory: a valid sample gets one enormous value or text, or many lines.

A reader may take twice the file's size, and 32 MiB. Some formats need more values than others: a tokenizer has
millions. Their limit is higher, by 240 bytes for each value that `max_values` of the format allows beyond 65,536.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megarl.files.strict_json import SMALL as FEW_VALUES
from megarl.types import MegarlError
from tests.hostile_files.formats import Format
from tests.hostile_files.mutated_files import FREE_BYTES, SECONDS, limited
from tests.resident_memory import peak_bytes, resident_bytes, restart_peak

_BYTES_PER_VALUE = 240
"""Memory that Python needs for one entry of a JSON object: its key, its number and its place."""


class Reading(NamedTuple):
    """How a reader took a grown file."""

    answer: str
    """"read", or the error."""
    is_fault: bool
    """Whether it raised anything else than a MegarlError."""
    peak_bytes: int
    """Growth of the process's resident memory until its peak."""
    limit_bytes: int | None
    """None: the format takes any number of values."""

    @property
    def is_careful(self) -> bool:
        return not self.is_fault and (self.limit_bytes is None or self.peak_bytes <= self.limit_bytes)


def read_grown(format: Format, folder: Path, growth: str, size: int) -> Reading | None:
    """Read a file of a format after a growth by `size` bytes. None: the growth does not fit the format."""
    folder.mkdir()
    file = format.make(folder)
    # Imports and caches of the reader do not count.
    format.read(file)
    content = GROWTHS[growth](file.read_bytes(), file.suffix, size)
    if content is None:
        return None
    file.write_bytes(content)
    num_bytes = len(content)
    del content
    restart_peak()
    before = resident_bytes()
    answer, is_fault = "read", False
    try:
        with limited(SECONDS):
            format.read(file)
    except MegarlError as error:
        answer = str(error).replace(str(folder), "")
    except BaseException as error:
        answer, is_fault = f"{type(error).__name__}: {error}", True
    peak, values = peak_bytes() - before, format.max_values
    limit = None if values is None else 2 * num_bytes + FREE_BYTES + _BYTES_PER_VALUE * (values - FEW_VALUES)
    return Reading(" ".join(answer.split())[:90], is_fault, peak, limit)


Growth = Callable[[bytes, str, int], bytes | None]
"""Makes a file of a sample, its ending and a number of bytes. None: the growth does not fit the format."""


def _with_value(make: Callable[[int], bytes], sample: bytes, ending: str, size: int) -> bytes | None:
    """Add a field with an enormous value to the first object of JSON or YAML, or to the header of safetensors."""
    if ending == ".yaml":
        return sample + b"\nzz: " + make(size) + b"\n"
    before, after = b"", b""
    if ending == ".safetensors":
        (length,) = struct.unpack("<Q", sample[:8])
        before, sample, after = sample[:8], sample[8 : 8 + length], sample[8 + length :]
    if sample.lstrip()[:1] not in (b"{", b"["):
        return None
    start = sample.find(b"{") + 1
    comma = b"" if sample[start:].lstrip().startswith(b"}") else b","
    grown = sample[:start] + b'"zz":' + make(size) + comma + sample[start:]
    if before:
        before = struct.pack("<Q", len(grown))
    return before + grown + after


def _with_rows(row: bytes | None, sample: bytes, ending: str, size: int) -> bytes | None:
    """Add rows, or repeat the sample's own."""
    if ending == ".json" and sample.startswith(b"["):
        added = row or sample[1:-1]
        return b"[" + b",".join([added] * (1 + size // (len(added) + 1))) + b"]"
    if ending not in (".jsonl", ".csv", ".jinja"):
        return None
    added = sample if row is None else row + b"\n"
    return sample + added * (size // len(added))


def _compressed(sample: bytes, ending: str, size: int) -> bytes | None:
    """Return a file of torch.save with one tensor of 8 times `size`, compressed to a thousandth."""
    if ending != ".pt":
        return None
    import torch

    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.zeros(2 * size)}, plain)
    with zipfile.ZipFile(plain) as read, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as written:
        for part in read.infolist():
            written.writestr(part.filename, read.read(part))
    return packed.getvalue()


def _keys(size: int) -> bytes:
    return b"{" + b",".join(b'"%x":0' % number for number in range(size // 10)) + b"}"


GROWTHS: dict[str, Growth] = {
    "empty lists": partial(_with_value, lambda size: b"[" + b"[]," * (size // 3) + b"0]"),
    "keys": partial(_with_value, _keys),
    "numbers": partial(_with_value, lambda size: b"[" + b"1.5," * (size // 4) + b"0]"),
    "one text": partial(_with_value, lambda size: b'"' + b"x" * size + b'"'),
    "empty rows": partial(_with_rows, b"{}"),
    "rows of the sample": partial(_with_rows, None),
    "zeros": lambda sample, ending, size: bytes(size),
    "zeros at the end": lambda sample, ending, size: sample + bytes(size),
    "compressed": _compressed,
    "brackets": lambda sample, ending, size: b"[" * size,
}
