"""Fork servers that drivers share: one import for all, and each driver's processes end with it alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.processes.fork_server import ForkServer
from megarl.types import ConfigError
from tests.child_processes import is_alive, rank_processes
from tests.rewards.pools import wait_until
from tests.shared_fork_servers import _ROOT, SHARED, _shared_path, shared_fork_servers

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "tests/probes/shared.py"
MODULE = """
import os, signal

with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")

def wait(connection):
    variables = (os.environ.get("COLOUR"), os.environ.get("PYTEST_XDIST_WORKER"))
    connection.sendall("{} {} {} {}\\n".format(os.getpid(), os.getppid(), *variables).encode())
    while True:
        signal.pause()  # It ignores the end of its connection, so it must be killed.
"""
DRIVER = """
import asyncio, os, sys
from megarl.processes.fork_server import end_fork_servers, fork_server

async def drive():
    with open("log", "ab") as log:
        server = fork_server(os.environ, ["shared_probe"], log)
        process = server.fork(f"megarl rank {os.environ.get('RANK')}", "shared_probe:wait", os.environ, log)
    line = await asyncio.to_thread(process.connection.makefile().readline)
    print(line, end="", flush=True)
    loop = asyncio.get_running_loop()

    def on_input():
        # A line asks for the end of the process; the end of all lines asks for nothing.
        process.kill() if sys.stdin.readline() else loop.remove_reader(sys.stdin)

    loop.add_reader(sys.stdin, on_input)
    await process.ended
    print(process.exit_code, flush=True)
    process.release()

asyncio.run(drive())
end_fork_servers()
"""
STRANGER = """
import json, os, socket, sys

os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(5)  # A server that accepts a driver sends nothing.
wanted = {"environment": {}, "path": sys.path, "imports": [], "executable": sys.executable}
try:
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [json.dumps(wanted).encode()], [1])
    answer = connection.recv(1)
except (BrokenPipeError, ConnectionResetError):
    answer = b""
print("refused" if answer == b"" else answer)
"""
Start = Callable[..., tuple["subprocess.Popen[str]", tuple[int, int]]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(folder, VARIABLE=...)` starts a driver in that folder. Returns it, its process and the server."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/shared_probe.py").write_text(MODULE)
    path = os.pathsep.join(filter(None, (str(tmp_path / "modules"), os.getcwd(), os.environ.get("PYTHONPATH"))))
    variables = {"IMPORTED": str(tmp_path / "imported"), "PYTHONPATH": path}
    drivers: list[subprocess.Popen[str]] = []

    def started(name: str, **own: str) -> tuple[subprocess.Popen[str], tuple[int, int]]:
        (tmp_path / name).mkdir(exist_ok=True)
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            cwd=tmp_path / name,
            env={**os.environ, **variables, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        drivers.append(driver)
        assert driver.stdout is not None
        pid, parent, colour, _ = driver.stdout.readline().split()
        assert colour == own.get("COLOUR", "None")
        return driver, (int(pid), int(parent))

    yield started
    for driver in drivers:
        driver.kill()
        driver.communicate()


def imported(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "imported").read_text().split()]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def end(driver: subprocess.Popen[str]) -> str:
    """Make the driver kill its process. Return the exit code that the driver printed."""
    output, _ = driver.communicate("\n", timeout=60)
    assert driver.returncode == 0
    return output.strip()


def test_drivers_import_once_and_a_killed_driver_ends_its_own_processes_only(start: Start, tmp_path: Path) -> None:
    first, (first_rank, first_server) = start("first", RANK="1")
    second, (second_rank, second_server) = start("second", RANK="2")
    [importer] = imported(tmp_path)
    assert rank_processes(first.pid) == {1: first_rank} and rank_processes(second.pid) == {2: second_rank}
    assert parent(first_server) == parent(second_server) == importer and first_server != second_server
    first.kill()
    wait_until(lambda: not is_alive(first_rank) and not is_alive(first_server), seconds=60)
    assert is_alive(second_rank)
    assert end(second) == "-9" and not is_alive(second_rank)
    wait_until(lambda: not is_alive(second_server), seconds=60)
    # Another variable needs another server. An existing server is used again.
    others = [start(name, COLOUR=colour)[0] for name, colour in (("first", "red"), ("second", "blue"), ("new", "red"))]
    assert len(imported(tmp_path)) == 3
    assert [end(driver) for driver in others] == ["-9"] * 3


def test_drivers_notice_that_the_shared_server_was_killed(start: Start, tmp_path: Path) -> None:
    driver, (rank, _) = start("first")
    [importer] = imported(tmp_path)
    os.kill(importer, signal.SIGKILL)
    output, _ = driver.communicate(timeout=60)
    assert output == "-9\n" and driver.returncode == 0
    wait_until(lambda: not is_alive(rank), seconds=60)
    again, _ = start("first")
    assert len(imported(tmp_path)) == 2 and end(again) == "-9"


def test_all_end_with_the_process_that_shares_them(start: Start, tmp_path: Path) -> None:
    with shared_fork_servers():
        driver, (rank, server) = start("first")
        address = Path(os.environ[SHARED])
    output, _ = driver.communicate(timeout=60)
    assert output == "-9\n" and driver.returncode == 0
    [importer] = imported(tmp_path)
    wait_until(lambda: not any(map(is_alive, (rank, server, importer))), seconds=60)
    assert not address.parent.exists()


def test_workers_of_a_run_of_tests_share_them(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers run the probe. Its process has the variables of its own worker."""
    for name, value in {"PYTEST_ADDOPTS": "", "IMPORTED": str(tmp_path / "imported")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    options = ["-q", "-p", "no:cacheprovider", "--numprocesses=2", "--dist=each", f"--basetemp={tmp_path / 'base'}"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, PROBE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    assert len(imported(tmp_path)) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_strangers_are_refused(tmp_path: Path) -> None:
    with shared_fork_servers():
        address = Path(os.environ[SHARED])
        assert address.parent.stat().st_mode & 0o777 == 0o700
        # Even if the permissions of the folder and the socket let other users in.
        address.parent.chmod(0o755)
        address.chmod(0o777)
        # The folders above are private, so the stranger starts in this one.
        done = subprocess.run(
            [sys.executable, "-c", STRANGER, address.name],
            cwd=address.parent,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout == "refused\n", done.stdout + done.stderr


def refused(tmp_path: Path) -> str:
    with (tmp_path / "log").open("ab") as log, pytest.raises(ConfigError) as caught:
        ForkServer(os.environ, [], log)
    return str(caught.value)


def test_a_missing_broker_is_an_error_that_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED, str(tmp_path / "none"))
    assert SHARED in refused(tmp_path) and "none" in refused(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_broker_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(tmp_path / "theirs")
    monkeypatch.setenv(SHARED, address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        os.seteuid(65534)
        try:
            listener.listen()  # Clients see the credentials of the process that called listen().
        finally:
            os.seteuid(0)
        assert "another user" in refused(tmp_path)


def test_a_server_imports_this_repository_and_no_installed_one(tmp_path: Path) -> None:
    changed, installed, unneeded = (str(tmp_path / name) for name in ("changed", "installed", "unneeded"))
    for folder in (changed, installed):
        (Path(folder) / "megarl").mkdir(parents=True)
    Path(unneeded).mkdir()
    path = [entry for entry in sys.path if Path(entry).is_relative_to(sys.prefix) and Path(entry) != Path(_ROOT)]
    assert path
    assert _shared_path([_ROOT, unneeded, *path, installed], ["megarl.api"]) == [_ROOT, *path, installed]
    assert _shared_path([*path, _ROOT], ["megarl.api"]) == [_ROOT, *path]
    # A changed copy of the package comes before it.
    assert _shared_path([changed, _ROOT, *path], ["megarl.api"]) == [changed, _ROOT, *path]
