"""Limits of work on untrusted input, and of open files."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.checkpoint import torch_dist_reader
from megarl.processes.process_tree import FaultyInputError, fault_of
from megarl.types import DataError


def endless() -> None:
    while True:
        pass


def test_work_is_bounded_in_time_and_memory() -> None:
    assert fault_of(lambda: None, seconds=5, memory_bytes=1 << 28) is None
    assert fault_of(lambda: 1 / 0, seconds=5, memory_bytes=1 << 28) is None  # An error is no exceeded limit.
    assert fault_of(lambda: bytearray(1 << 30), seconds=5, memory_bytes=1 << 28) == "takes more than 256 MiB of memory"
    assert fault_of(endless, seconds=0.05, memory_bytes=1 << 28) == "takes more than 0.05 s"


def test_a_fault_of_the_input_is_returned_and_output_discarded(capfd: pytest.CaptureFixture[str]) -> None:
    def print_and_fail() -> None:
        os.write(2, b"noise")
        raise FaultyInputError("has \u00fc " + "long" * 1000)

    assert str(fault_of(print_and_fail, seconds=5, memory_bytes=1 << 28)).startswith("has \u00fc longlong")
    assert (
        fault_of(os.abort, seconds=5, memory_bytes=1 << 28) == "takes more than 256 MiB of memory, or crashes (SIGABRT)"
    )
    assert "(exit code 3)" in str(fault_of(lambda: os._exit(3), seconds=5, memory_bytes=1 << 28))
    assert capfd.readouterr().err == ""


def test_a_small_pickle_that_loads_endlessly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


_START = """
import asyncio, resource, sys
from pathlib import Path
from tools.local_group import LocalGroup
soft, hard, ranks = map(int, sys.argv[1:4])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
async def drive():
    group = await LocalGroup(ranks).start("probe:Probe", {}, log_folder=Path(sys.argv[4]))
    print(len(await group.call("pid")))
    await group.close()
asyncio.run(drive())
"""


def start_ranks(soft: int, hard: int, num_ranks: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Start ranks in a process with these limits of open files; it prints their number."""
    paths = [*sys.path, str(Path(__file__).resolve().parents[1] / "cluster")]
    return subprocess.run(
        [sys.executable, "-c", _START, *map(str, (soft, hard, num_ranks, folder))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.distributed
def test_an_agent_raises_the_limit_of_open_files_or_names_it(tmp_path: Path) -> None:
    done = start_ranks(24, 2000, 12, tmp_path)
    assert done.stdout.split() == ["12"], done.stderr
    done = start_ranks(200, 300, 40, tmp_path / "none")
    assert done.returncode == 1, done.stdout
    assert "ConfigError: 40 ranks on this node need 160 open files of their agent" in done.stderr
    assert "hard limit of open files (RLIMIT_NOFILE, `ulimit -Hn`) is 300; raise it to" in done.stderr
    assert not list((tmp_path / "none").iterdir())  # No rank was started.
