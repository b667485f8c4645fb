"""Work that nobody vouches for is tried where it can be stopped."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from megarl.checkpoint import torch_dist_reader
from megarl.platform.processes import fault_of
from megarl.types import DataError


def endless() -> None:
    while True:
        pass


def test_work_is_bounded_in_time_and_memory() -> None:
    assert fault_of(lambda: None, seconds=5, memory_bytes=1 << 28) is None
    assert fault_of(lambda: 1 / 0, seconds=5, memory_bytes=1 << 28) is None  # it will raise here too
    assert fault_of(lambda: bytearray(1 << 30), seconds=5, memory_bytes=1 << 28) == "takes more than 256 MiB of memory"
    assert fault_of(endless, seconds=0.05, memory_bytes=1 << 28) == "takes more than 0.05 s"


def test_a_pickle_that_is_small_and_endless_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuple that holds itself twice, and so on: 2^60 steps to hash it, which a dictionary does with its keys."""
    nested: tuple[object, ...] = ()
    for _ in range(60):
        nested = (nested, nested)
    # A dictionary {nested: None}, written without hashing it here: the opcodes of the tuple between those of a dict.
    body = pickle.dumps(nested, protocol=2)
    (tmp_path / ".metadata").write_bytes(b"\x80\x02}" + body[2:-1] + b"Ns.")
    monkeypatch.setattr(torch_dist_reader, "_SECONDS", 0.05)
    with pytest.raises(DataError, match=r"\.metadata: cannot be read .* takes more than 0\.05"):
        torch_dist_reader.read_metadata(tmp_path / ".metadata")
