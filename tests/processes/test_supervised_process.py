"""Programs with a supervisor: their signals, and reports of their end."""

from __future__ import annotations

import signal

import pytest

from megarl.processes import supervised_process
from megarl.processes.supervised_process import Ended, SupervisedProcess


def test_a_program_handles_the_signals_that_python_ignores() -> None:
    ended = SupervisedProcess(["cat", "/proc/self/status"]).end()
    [mask] = [int(line.split()[1], 16) for line in ended.stdout.splitlines() if line.startswith("SigIgn")]
    assert ended.exit_code == 0
    assert not [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if mask >> (number - 1) & 1]
    assert SupervisedProcess(["sh", "-c", "yes | head -1"]).end() == Ended(0, "y\n")


@pytest.mark.parametrize(
    ("supervisor", "ended", "text"),
    [
        pytest.param("raise SystemExit(3)", Ended(None, refused="its supervisor ended with 3"), "its supervisor"),
        pytest.param("", Ended(None), "was killed"),
        pytest.param("import os; os.kill(os.getpid(), 9)", Ended(137), "was killed by SIGKILL"),
    ],
    ids=["fails", "reports nothing", "killed"],
)
def test_the_end_of_a_supervisor_is_no_exit_code_of_the_program(
    monkeypatch: pytest.MonkeyPatch, supervisor: str, ended: Ended, text: str
) -> None:
    monkeypatch.setattr(supervised_process, "_SUPERVISOR", supervisor)
    found = SupervisedProcess(["true"]).end()
    assert found == ended and text in str(found)
