"""Programs that are launched: their session, their input and their end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from megarl.processes.launcher import DEVNULL, PIPE, LaunchedProgram, python_call

_REPORT = """
import os, sys

def report(prefix):
    print(prefix, os.getsid(0) == os.getpid(), sys.stdin.readline().strip(), sys.path[-1])
"""


def test_a_function_is_called_in_a_session_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "reporting.py").write_text(_REPORT)
    command = python_call("reporting:report", "seven", path=[*sys.path, str(tmp_path)])
    with (tmp_path / "log").open("wb") as log:
        program = LaunchedProgram(command, secret=b"key\n", stdout=log, stderr=log)
        assert program.wait() == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text() == f"seven True key {tmp_path}\n"
    assert "key" not in " ".join(command)


async def test_the_end_of_a_program_is_awaited_once_or_again() -> None:
    program = LaunchedProgram(["sleep", "600"])
    assert program.exit_code() is None
    threading.Timer(0.1, program.signal, [signal.SIGTERM]).start()
    assert await program.wait_for_end() == -signal.SIGTERM
    assert await program.wait_for_end() == -signal.SIGTERM == program.exit_code()
    # The id may belong to another process by now.
    program.signal(signal.SIGKILL)


def test_a_killed_program_is_reaped() -> None:
    program = LaunchedProgram(["sleep", "600"], stdout=DEVNULL)
    assert program.kill() == -signal.SIGKILL
    assert not Path(f"/proc/{program.pid}").exists()


def test_a_program_that_reads_nothing_is_no_error() -> None:
    command = ["sh", "-c", "exec <&-; echo $VARIABLE $PWD >&2; exit 3"]
    environment = {"VARIABLE": "7", "PATH": os.environ["PATH"]}
    program = LaunchedProgram(command, folder="/", environment=environment, secret=b"key" * 20000, stderr=PIPE)
    with program.stderr as errors:
        assert errors.read() == b"7 /\n"
    assert program.wait() == 3
