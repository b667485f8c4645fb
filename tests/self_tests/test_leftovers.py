"""A run of pytest, whatever ends it, leaves nothing; what its tests leave fails it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.files.private_folder import PrivateFolder
from tests.child_processes import start_with_default_signals
from tests.leftovers import MARK, Watch, marked_processes, memory_names

pytestmark = pytest.mark.distributed

PROBES = Path(__file__).parents[1] / "probes"


def start_pytest(probe: str, folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Run pytest on a probe, with temporary files in a folder of its own."""
    for name in ("tmp", "base"):
        (folder / name).mkdir(parents=True)
    environment |= {
        "TMPDIR": str(folder / "tmp"),
        "PYTEST_DEBUG_TEMPROOT": str(folder / "base"),
        "PYTEST_ADDOPTS": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PROBES / probe), *arguments]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return start_with_default_signals(command, env={**os.environ, **environment}, **pipe)


def mark_of(pid: int) -> str:
    """The mark of a run of pytest, from what it started."""
    entries = [e for p in Path("/proc").glob("[0-9]*") for e in environment_of(p) if e.startswith(f"{MARK}=")]
    return next(found[0] for e in entries if (found := re.findall(rf"\b{pid}-\d+(?=,)", e)))


def environment_of(process: Path) -> list[str]:
    try:
        return (process / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def wait_until(is_so: Callable[[], bool], driver: subprocess.Popen[str] | None = None, seconds: float = 240) -> None:
    ending = time.monotonic() + seconds
    while not is_so():
        assert driver is None or driver.poll() is None, driver.communicate()
        assert time.monotonic() < ending
        time.sleep(0.05)


def end_pytest(number: signal.Signals, folder: Path, *arguments: str, **held: str) -> list[str]:
    """End a run that holds processes by a signal, see that all of them end; the commands of what it held."""
    driver = start_pytest("interrupted.py", folder, *arguments, HOLDING=str(folder), **held)
    try:
        wait_until((folder / "rank").exists, driver)
        mark = mark_of(driver.pid)
        commands = [process.command for process in marked_processes(mark)]
        driver.send_signal(number)
        driver.communicate(timeout=240)
    finally:
        driver.kill()
    # Ray takes SIGTERM over, and exits with 1.
    assert driver.returncode in ((-number,) if number == signal.SIGKILL else (pytest.ExitCode.INTERRUPTED, 1))
    wait_until(lambda: not marked_processes(mark) and not any((folder / "tmp").iterdir()))
    return commands


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGHUP, 0, marks=pytest.mark.long),
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.long),
    ],
)
def test_ended_by_a_signal_pytest_leaves_nothing(tmp_path: Path, number: signal.Signals, workers: int) -> None:
    commands = end_pytest(number, tmp_path, f"--numprocesses={workers}")
    # The rank, its server, the process that ends this with its driver, and the server that it was forked from.
    assert sum("tests.shared_fork_servers:lend" in command for command in commands) == 4, commands
    assert any("setsid" in command for command in commands), commands


@pytest.mark.parametrize("workers", [0, 1])
def test_what_tests_leave_fails_the_run_and_is_removed(tmp_path: Path, workers: int) -> None:
    driver = start_pytest("leftovers.py", tmp_path, "--leftover-seconds=0", f"--numprocesses={workers}")
    output, _ = driver.communicate(timeout=240)
    assert driver.returncode == pytest.ExitCode.TESTS_FAILED
    left = re.search(r"this run of the tests has left:\n(process \d+: .*\n(?:.*\n)*?)(/.*)\n(/dev/shm/.*)\n", output)
    assert left is not None and "1 passed, 1 error" in output.splitlines()[-1], output
    assert Path(left[3]).name == f"megarl-left-{Path(left[2]).name}"
    wait_until(lambda: not Path(left[3]).exists() and not any((tmp_path / "tmp").iterdir()))


def test_the_folder_of_an_unmarked_process_that_is_about_to_end_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of a fork server that several workers share lack the mark of the worker for which they ran."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # `Watch` adds its mark to the variable.
    monkeypatch.setenv(MARK, os.environ.get(MARK, ""))
    watch = Watch()
    monkeypatch.setattr(tempfile, "tempdir", str(watch.folder))
    hold = "from megarl.files.private_folder import PrivateFolder as F; f = F(); print(flush=True); input()"
    unmarked = {name: value for name, value in os.environ.items() if name != MARK} | {"TMPDIR": str(watch.folder)}
    with subprocess.Popen(
        [sys.executable, "-c", hold], env=unmarked, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        num_calls = 0

        def remove_abandoned() -> None:
            nonlocal num_calls
            num_calls += 1
            PrivateFolder().remove()
            if num_calls == 1:
                process.kill()
                process.wait()

        [left] = watch.leftovers_at_end(0.0, PrivateFolder().remove)
        assert Path(left).name.startswith("megarl-run-")
        assert watch.leftovers_at_end(60.0, remove_abandoned) == [] and num_calls == 2


@pytest.mark.parametrize(
    ("name", "counts"), [("psm_1234", True), ("libpod_lock", False), ("libpod_rootless_lock_0", False)]
)
def test_locks_of_podman_do_not_count_as_shared_memory(name: str, counts: bool) -> None:
    maps = f"7f12-7f13 rw-s 00000000 00:18 2   /dev/shm/{name}\n".encode()
    assert memory_names(maps) == ({name} if counts else set())


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_out_is_said_above_the_closing_line(tmp_path: Path, workers: int) -> None:
    driver = start_pytest("skipped.py", tmp_path, f"--numprocesses={workers}")
    output, _ = driver.communicate(timeout=240)
    *_, title, reason, closing = output.splitlines()
    assert "left out on this machine" in title and reason == "2 tests: needs a second moon"
    assert closing.startswith("2 skipped in"), output
