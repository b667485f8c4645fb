"""Short commands that the caller waits for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.platform.commands import run_command


def test_a_command_has_input_folder_and_variables(tmp_path: Path) -> None:
    code = "import os, sys; print(input(), os.environ['A'], os.getcwd()); os.write(2, b'\\xff'); sys.exit(3)"
    done = run_command([sys.executable, "-c", code], stdin="seven", folder=tmp_path, environment={"A": "b"})
    assert (done.returncode, done.stdout, done.stderr) == (3, f"seven b {tmp_path}\n", "\ufffd")


def test_a_command_that_hangs_is_killed() -> None:
    with pytest.raises(TimeoutError, match=r"sleep did not end within 0\.1 s"):
        run_command(["sleep", "600"], seconds=0.1)
    with pytest.raises(FileNotFoundError):
        run_command(["no-such-program"])
