"""Programs that tests send signals to, where nohup or a script's `&` has made pytest ignore those."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.child_processes import start_with_default_signals

IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


@pytest.fixture
def as_under_nohup() -> Iterator[None]:
    """Signals that end a run are ignored, and whatever is started inherits that."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ignored_by(process: subprocess.Popen[str]) -> set[signal.Signals]:
    """The signals of `IGNORED` that `cat /proc/self/status` ignored."""
    output, _ = process.communicate()
    [mask] = [int(line.split()[1], 16) for line in output.splitlines() if line.startswith("SigIgn")]
    return {number for number in IGNORED if mask >> (number - 1) & 1}


@pytest.mark.usefixtures("as_under_nohup")
def test_a_program_handles_signals_by_default_where_pytest_ignores_them() -> None:
    command, options = ["cat", "/proc/self/status"], {"stdout": subprocess.PIPE, "text": True}
    assert ignored_by(subprocess.Popen(command, **options)) == set(IGNORED)
    assert ignored_by(start_with_default_signals(command, **options)) == set()
    assert {number: signal.getsignal(number) for number in IGNORED} == dict.fromkeys(IGNORED, signal.SIG_IGN)
