"""Programs with a supervisor: their signals, and reports of their end."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.processes import supervised_process
from megarl.processes.supervised_process import Ended, SupervisedProcess
from tests.child_processes import is_alive
from tests.rewards.pools import wait_until


def test_a_program_handles_the_signals_that_python_ignores() -> None:
    ended = SupervisedProcess(["cat", "/proc/self/status"]).end()
    [mask] = [int(line.split()[1], 16) for line in ended.stdout.splitlines() if line.startswith("SigIgn")]
    assert ended.exit_code == 0
    assert not [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if mask >> (number - 1) & 1]
    assert SupervisedProcess(["sh", "-c", "yes | head -1"]).end() == Ended(0, "y\n")


DRIVER = """
import sys
from megarl.processes.supervised_process import SupervisedProcess
program = SupervisedProcess(["sh", "-c", sys.argv[1]], end_seconds=float(sys.argv[2]))
print(program.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("seconds", "has_end"), [(600, True), (0.1, False), (0, False)])
def test_a_program_has_time_to_end_after_a_kill_of_its_driver(tmp_path: Path, seconds: float, has_end: bool) -> None:
    place = shlex.quote(str(tmp_path))
    program = f"cd {place}; until [ -e end ]; do sleep 0.05; done; touch ended"
    command = [sys.executable, "-c", DRIVER, program, str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        supervisor = int(driver.stdout.readline())
        driver.kill()
    if has_end:
        (tmp_path / "end").touch()
    wait_until(lambda: not is_alive(supervisor), seconds=60)
    assert (tmp_path / "ended").exists() == has_end


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
