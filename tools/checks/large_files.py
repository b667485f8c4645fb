"""Files made to exhaust memory: a reader takes at most twice the file's size, and 32 MiB.

The table has a row for each file format and kind of growth. A valid sample gets one enormous value or text, or many
lines. A new process reads the file; it may refuse it. The row shows by how much its resident memory grew until its
peak, and the total of its largest child process.

Some formats need more values than others: a tokenizer has millions. Their limit is higher, by 240 bytes for each value
that `max_values` of the format allows beyond 65,536. A format without that limit is only shown.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import re
import resource
import struct
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megarl.files.strict_json import SMALL as FEW_VALUES
from megarl.types import MegarlError
from tools.checks.fuzz import FREE_BYTES, SECONDS, limited
from tools.resident_memory import peak_bytes, resident_bytes, restart_peak

DURATION = {"small": "30 s (6 formats, 1 MiB)", "full": "15 min (16 MiB)"}
SMALL = {"mib": 1, "only": "status.json|^model: config.json|owners|manifest|tracker"}
_BYTES_PER_VALUE = 240
"""Memory that Python needs for one entry of a JSON object: its key, its number and its place."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=16, help="size of each file in MiB")
    parser.add_argument("--only", default="", help="formats whose name matches this regular expression")
    parser.add_argument("--growth", default="", help="kinds of growth that match this regular expression")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from tools.fuzz_formats import formats

    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tools.fuzz_formats"])
    with tempfile.TemporaryDirectory(prefix="megarl-large-") as name:
        shared = Path(name) / "shared"
        names = [format.name for format in formats(shared) if re.search(options.only, format.name)]
        for number, (format, growth) in enumerate((one, growth) for one in names for growth in GROWTHS):
            if not re.search(options.growth, growth):
                continue
            receiver, sender = processes.Pipe(duplex=False)
            given = (shared, Path(name) / str(number), format, growth, options.mib << 20, sender)
            reader = processes.Process(target=read, args=given)
            reader.start()
            # Close our copy, so that `recv` ends when the reader dies.
            sender.close()
            found: Any = {"MiB": 0.0, "answer": "the reader died or hangs", "met": False}
            with suppress(EOFError):
                # A reader may hang in C code, where no signal ends it.
                found = receiver.recv() if receiver.poll(SECONDS + 60) else found
            reader.kill()
            reader.join()
            if found is not None:
                yield {"format": format, "growth": growth, **found}


def read(shared: Path, folder: Path, name: str, growth: str, size: int, sender: Connection) -> None:
    """Read a file of a format after this growth. Sends the row of the table, None if the format does not have it."""
    from tools.fuzz_formats import formats

    [format] = [format for format in formats(shared) if format.name == name]
    folder.mkdir()
    file = format.make(folder)
    # Imports and caches of the reader do not count.
    format.read(file)
    content = GROWTHS[growth](file.read_bytes(), file.suffix, size)
    if content is None:
        sender.send(None)
        return
    file.write_bytes(content)
    num_bytes = len(content)
    del content
    restart_peak()
    before, largest_child, began = resident_bytes(), _largest_child_kib(), time.monotonic()
    answer, fault = "read", False
    try:
        with limited(SECONDS):
            format.read(file)
    except MegarlError as error:
        answer = str(error).replace(str(folder), "")
    except BaseException as error:
        answer, fault = f"{type(error).__name__}: {error}", True
    peak = peak_bytes() - before
    values = format.max_values
    allowed = None if values is None else 2 * num_bytes + FREE_BYTES + _BYTES_PER_VALUE * (values - FEW_VALUES)
    sender.send(
        {
            "MiB": num_bytes / (1 << 20),
            "seconds": time.monotonic() - began,
            "peak MiB": peak / (1 << 20),
            "limit MiB": "-" if allowed is None else allowed / (1 << 20),
            "child MiB": max(0, _largest_child_kib() - largest_child) / 1024,
            "answer": " ".join(answer.split())[:90],
            "met": not fault and (allowed is None or peak <= allowed),
        }
    )


def _largest_child_kib() -> int:
    """Return the peak of resident memory of the largest child that has ended, in KiB."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


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
