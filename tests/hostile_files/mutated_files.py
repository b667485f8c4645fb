"""Mutations of files, drawn by Hypothesis, and crafted pickles: how a format's reader takes them.

A reader may return a value, or raise a MegarlError that names the file. Anything else is a fault: another error, more
than 120 s, code that ran, or more memory than twice the file's size above 32 MiB. Readers of reports skip damaged
parts, so they never raise for a mutated file.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megarl.types import MegarlError
from tests.hostile_files.formats import Format

SECONDS = 120
"""Limit for reading one file. Readers in a child process may use 10 s of CPU time, and a busy machine is slow."""
TRACED_SECONDS = 600
"""Limit for reading one file while tracemalloc traces the reader. PyYAML then takes 15 times as long for nested lists.
"""
_RETIMED_SECONDS = 1.0
"""A reading that takes longer under tracemalloc is timed again without it."""
FREE_BYTES = 32 << 20
"""Memory that a reader may use beside twice the file's size: libraries, caches, buffers of fixed size."""
_MOST_REPEATED = 1 << 16
"""Length in bytes of the longest part that is repeated 50 times. Three changes would make gigabytes of a longer
one."""
_ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1 << 31,
    1 << 64,
    10**400,
    -0.5,
    1e308,
    "",
    "x" * 300,
    "\x00\x1b[31m\u202e",
    "../../etc/passwd",
    "/etc/passwd",
    "NaN",
    [],
    {},
    [[]],
    {"": None},
    ["a", 1, None],
    {"__class__": "x"},
    "${oc.env:HOME}",
    "<script>x</script>",
]
_TOKENS = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"{",
    b"}",
    b"[" * 3000,
    b'{"a":' * 3000,
    b'"',
    b",",
    b":",
    b"\n",
    b"NaN",
    b"Infinity",
    b"-1e999",
    b"9" * 5000,
    b"1e5",
    b"null",
    b"\\ud800",
    b"*a",
    b"&a [*a]",
    b"!!python/object:os.system",
    b"? ",
    b"2026-13-45",
    b"0b_",
    b"<<: 1",
    b"{% for i in range(10**9) %}",
    b"{{ x",
    b"\r",
    b"\xe2\x80\xa8",
    b"../",
    b"%",
]


class Crafted:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


class Result(NamedTuple):
    """How a format's reader took all hostile files."""

    num_read: int
    num_refused: int
    longest_seconds: float
    fault: str | None
    """The first thing that the reader did wrong. None: nothing."""


def read_mutations(format: Format, folder: Path, num_mutations: int, seed: int = 0) -> Result:
    """Read mutations of a format's sample, and crafted pickles, in a new folder."""
    folder.mkdir()
    sample = format.make(folder)
    content = sample.read_bytes()
    reading = _Reading(format, folder, sample)
    fault = reading.fault_of(content)
    if fault is None and reading.num_refused:
        fault = "the sample itself is refused"
    reading.num_read = 0
    for hostile in crafted(folder / "executed"):
        fault = fault or reading.fault_of(hostile)
        if (folder / "executed").exists():
            fault = "a pickle in the file was executed"
    fault = fault or _first_fault(reading, content, max(1, int(num_mutations * format.share)), seed)
    # The errors of a format must not depend on the files that another one left.
    shutil.rmtree(folder)
    return Result(reading.num_read, reading.num_refused, reading.longest_seconds, fault)


def _first_fault(reading: _Reading, content: bytes, num_mutations: int, seed: int) -> str | None:
    """Return the fault of the smallest mutation that Hypothesis finds, None if there is none."""

    @settings(
        max_examples=num_mutations,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        report_multiple_bugs=False,
    )
    @given(mutations(content))
    def read(mutated: bytes) -> None:
        if fault := reading.fault_of(mutated):
            raise AssertionError(f"{fault} for {mutated[:200]!r} ({len(mutated)} bytes)")

    from hypothesis import seed as with_seed

    try:
        with_seed(seed)(read)()
    except AssertionError as error:
        return " ".join(str(error).split())[:900]
    return None


def crafted(target: Path) -> list[bytes]:
    """Return files that would make the folder `target` if a pickle in them were loaded."""
    plain = [pickle.dumps(Crafted(str(target)), protocol=protocol) for protocol in (0, 2, 4)]
    return [*plain, json.dumps({"__reduce__": ["os.mkdir", str(target)]}).encode(), _zipped(plain[1])]


def _zipped(content: bytes) -> bytes:
    """Return a file of torch.save with this pickle."""
    import io
    import zipfile

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


class _Outcome(NamedTuple):
    """Outcome of reading one file. `fault` describes an error of the reader; None if it has none."""

    fault: str | None
    is_refused: bool
    seconds: float


class _Reading:
    """Reads files of one format, and measures time and memory."""

    def __init__(self, format: Format, folder: Path, sample: Path) -> None:
        self._format, self._folder, self._file = format, folder, sample
        self.num_read = self.num_refused = 0
        self.longest_seconds = 0.0

    def fault_of(self, content: bytes) -> str | None:
        """Return what is wrong with the reading of this content, None if nothing."""
        self.num_read += 1
        tracemalloc.start()
        try:
            reading = self._read(content, TRACED_SECONDS)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.num_refused += reading.is_refused
        if reading.fault is None and reading.seconds > _RETIMED_SECONDS:
            reading = self._read(content, SECONDS)
        self.longest_seconds = max(self.longest_seconds, reading.seconds)
        is_large = peak > 2 * len(content) + FREE_BYTES
        return reading.fault or (f"{peak >> 20} MiB of memory" if is_large else None)

    def _read(self, content: bytes, limit_seconds: int) -> _Outcome:
        # A reader may not change its file. Where it removes lines, the next content is written anew.
        self._file.write_bytes(content)
        began = time.monotonic()
        fault, is_refused = None, False
        try:
            with limited(limit_seconds):
                self._format.read(self._file)
        except MegarlError as error:
            fault, is_refused = self._fault_in(error), True
        except KeyboardInterrupt:
            raise
        # SystemExit too: no file may end the process. A panic of Rust is a BaseException.
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        # A destructor may swallow the time-out.
        if fault is None and seconds > limit_seconds:
            fault = f"reading takes more than {limit_seconds} s"
        return _Outcome(fault, is_refused, seconds)

    def _fault_in(self, error: MegarlError) -> str | None:
        """Return what is wrong with an error that refuses a file, None if nothing."""
        if self._format.never_raises:
            return f"{type(error).__name__}: {error}"
        if self._file.name not in str(error) and self._folder.name not in str(error):
            return f"the error does not name the file: {error}"
        return None


class TooSlowError(BaseException):
    """Raised when reading a file takes too long. Derived from BaseException, because readers catch Exceptions."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TooSlowError in the block after so many seconds."""

    def end(*_: object) -> None:
        raise TooSlowError(f"reading takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@st.composite
def mutations(draw: st.DrawFn, sample: bytes) -> bytes:
    """Draw a mutation of a file: a changed value where it has JSON, then changes of bytes."""
    content = sample
    is_changed = draw(st.booleans())
    if is_changed:
        content = _changed_json(draw, content)
    for _ in range(draw(st.integers(0 if is_changed else 1, 3))):
        content = _changed_bytes(draw, content)
    return content


def _changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    start = draw(st.integers(0, len(content)))
    stop = min(len(content), start + draw(st.sampled_from([0, 1, 1, 2, 8, 64, len(content)])))
    part = content[start:stop]
    match draw(st.sampled_from(["flip", "cut", "delete", "repeat", "insert", "replace", "swap"])):
        case "flip" if part:
            changed = bytes([part[0] ^ (1 << draw(st.integers(0, 7)))]) + part[1:]
        case "cut":
            return content[:start]
        case "delete":
            changed = b""
        case "repeat":
            changed = part * draw(st.sampled_from([2, 50] if len(part) <= _MOST_REPEATED else [1, 2]))
        case "swap":
            changed = part[::-1]
        case "insert":
            changed = draw(st.sampled_from(_TOKENS)) + part
        case _:
            changed = draw(st.sampled_from(_TOKENS))
    return content[:start] + changed + content[stop:]


def _changed_json(draw: st.DrawFn, content: bytes) -> bytes:
    """Change a value of the file's JSON: the whole file, a line of it, or the header of a safetensors file."""
    header, rest = b"", b""
    if len(content) > 8 and content[8:9] == b"{":
        (size,) = struct.unpack("<Q", content[:8])
        header, content, rest = content[:8], content[8 : 8 + size], content[8 + size :]
    lines = content.split(b"\n") if b"}\n{" in content else [content]
    place = draw(st.integers(0, len(lines) - 1))
    try:
        value = json.loads(lines[place])
    except ValueError:
        return header + content + rest
    lines[place] = json.dumps(_changed_value(draw, value)).encode()
    content = b"\n".join(lines)
    return (struct.pack("<Q", len(content)) if header else b"") + content + rest


def _changed_value(draw: st.DrawFn, value: Any) -> Any:
    """Replace, remove or repeat one value inside a JSON value."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(_ODD_VALUES))
    key = draw(st.sampled_from(keys))
    changed = value.copy()
    if draw(st.integers(0, 7)) == 0:
        del changed[key]
    else:
        changed[key] = _changed_value(draw, value[key])
    return changed
