"""A fork server's processes: what they share, what is their own, and how they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.processes.fork_server import ForkedProcess, ForkServer, end_fork_servers, fork_server
from tests.child_processes import is_alive
from tests.rewards.pools import wait_until
from tests.shared_fork_servers import SHARED

MODULE = """
import json, os, signal, sys, tempfile

if "MAKES_FILES" in os.environ:
    os.environ["MADE_BY_IMPORT"] = tempfile.mkdtemp()
    open(os.path.join(tempfile.gettempdir(), "made"), "w").close()

with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")

def report(connection):
    print("reported")
    names = ("RANK", "TMPDIR", "OMP_NUM_THREADS", "LOCAL_RANK", "MADE_BY_IMPORT")
    found = {name: os.environ.get(name) for name in names}
    found |= {"session": os.getsid(0), "pid": os.getpid(), "parent": os.getppid(), "folder": os.getcwd()}
    found |= {"temporary": tempfile.gettempdir(), "torch": "torch" in sys.modules}
    connection.sendall(json.dumps(found).encode() + b"\\n")
    connection.recv(1)

def leave_with_3(connection):
    sys.exit(3)

def fail(connection):
    raise ValueError("seven")

def leave_a_child(connection):
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    connection.sendall(json.dumps({"child": child.pid}).encode() + b"\\n")

def start_a_session(connection):
    import subprocess
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    connection.sendall(json.dumps({"child": child.pid}).encode() + b"\\n")
    connection.recv(1)

def threads(connection):
    import torch
    found = {"threads": torch.get_num_threads(), "sum": torch.ones(1 << 20).sum().item()}
    connection.sendall(json.dumps(found).encode() + b"\\n")
"""


@pytest.fixture(params=["own", "shared"])
def environment(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """Variables of a driver with a fork server of its own, or with the shared ones of this test run."""
    if request.param == "own":
        monkeypatch.delenv(SHARED)
    (tmp_path / "forked_probe.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Unbuffered, as a driver asks of its ranks: a killed process has written what it printed.
    own = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2", "LOCAL_RANK": "5"}
    yield {**os.environ, **own, "IMPORTED": str(tmp_path / "imported")}
    end_fork_servers()


def fork(server: ForkServer, name: str, environment: dict[str, str], log: Path) -> ForkedProcess:
    with log.open("ab") as output:
        return server.fork(name, f"forked_probe:{name}", environment, output)


def server_of(environment: dict[str, str], log: Path, *imports: str) -> ForkServer:
    with log.open("ab") as output:
        return fork_server(environment, imports, output)


async def report_of(process: ForkedProcess) -> dict[str, Any]:
    process.connection.setblocking(False)
    text = b""
    while not text.endswith(b"\n"):
        text += await asyncio.get_running_loop().sock_recv(process.connection, 4096)
    while process.pid is None:  # The server may send the id later than the process its report.
        await asyncio.sleep(0.01)
    return json.loads(text)


def imported(environment: dict[str, str]) -> list[str]:
    return Path(environment["IMPORTED"]).read_text().split()


async def test_processes_share_imports_and_nothing_else(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment["MAKES_FILES"] = "1"
    server = server_of(environment, tmp_path / "log", "forked_probe")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    own = {**environment, "RANK": "1", "TMPDIR": str(tmp_path)}
    first = fork(server, "report", own, tmp_path / "first")
    del own["LOCAL_RANK"]
    second = fork(server, "report", {**own, "RANK": "2"}, tmp_path / "second")
    reports = [await report_of(process) for process in (first, second)]
    assert [first.pid, second.pid] == [one["pid"] for one in reports] == [one["session"] for one in reports]
    assert reports[0]["parent"] == reports[1]["parent"] and len(imported(environment)) == 1
    assert [one["RANK"] for one in reports] == ["1", "2"]
    assert [one["LOCAL_RANK"] for one in reports] == ["5", None]
    assert {one["MADE_BY_IMPORT"] for one in reports} == {None}
    assert not (tmp_path / "made").exists() and not (Path(tempfile.gettempdir()) / "made").exists()
    assert {str(one["OMP_NUM_THREADS"]) for one in reports} == {"2"}
    assert {one["temporary"] for one in reports} == {str(tmp_path)}
    assert {one["folder"] for one in reports} == {str(tmp_path / "other")}
    first.connection.close()
    await first.ended
    assert first.exit_code == 0 and second.exit_code is None
    second.kill()
    await second.ended
    assert second.exit_code == -signal.SIGKILL
    for process in (first, second):
        process.release()
    assert (tmp_path / "first").read_text() == (tmp_path / "second").read_text() == "reported\n"
    assert server_of(environment, tmp_path / "log", "forked_probe") is server
    assert server_of({**environment, "OTHER": "1"}, tmp_path / "log", "forked_probe") is not server


@pytest.mark.parametrize("ends", [False, True])
async def test_the_first_process_has_the_output_of_early_imports(
    environment: dict[str, str], tmp_path: Path, ends: bool
) -> None:
    if ends and SHARED in os.environ:
        pytest.skip("a shared server that ends is replaced by the broker")
    ending = "os._exit(7)" if ends else ""
    (tmp_path / "forked_probe.py").write_text(f"import os\nprint('imported', flush=True)\n{ending}\n{MODULE}")
    early = fork_server(environment, ["forked_probe"])
    server = server_of(environment, tmp_path / "log", "forked_probe")
    assert server is early
    processes = [fork(server, "leave_with_3", environment, tmp_path / name) for name in ("first", "second")]
    for process in processes:
        await process.ended
        process.release()
    assert [process.exit_code for process in processes] == [7 if ends else 3] * 2
    assert (tmp_path / "first").read_text() == "imported\n" and (tmp_path / "second").read_text() == ""


async def test_exit_codes_are_those_of_an_interpreter(environment: dict[str, str], tmp_path: Path) -> None:
    server = server_of(environment, tmp_path / "log")
    processes = [fork(server, name, environment, tmp_path / name) for name in ("leave_with_3", "fail", "unknown")]
    for process in processes:
        await process.ended
        process.release()
    assert [process.exit_code for process in processes] == [3, 1, 1]
    assert (tmp_path / "fail").read_text().endswith("ValueError: seven\n")
    assert len(imported(environment)) == 3  # The server imported nothing before.


async def test_the_rest_of_a_process_group_is_killed_on_release(environment: dict[str, str], tmp_path: Path) -> None:
    server = server_of(environment, tmp_path / "log")
    process = fork(server, "leave_a_child", environment, tmp_path / "log")
    child = (await report_of(process))["child"]
    await process.ended
    assert process.exit_code == 0 and is_alive(child)
    process.release()
    end_fork_servers()
    wait_until(lambda: not is_alive(child), seconds=60)


async def test_a_killed_process_takes_children_in_other_sessions_along(
    environment: dict[str, str], tmp_path: Path
) -> None:
    server = server_of(environment, tmp_path / "log")
    process = fork(server, "start_a_session", environment, tmp_path / "log")
    child = (await report_of(process))["child"]
    process.kill()
    await process.ended
    assert process.exit_code == -signal.SIGKILL
    wait_until(lambda: not is_alive(child), seconds=60)
    process.release()


async def test_each_process_raises_a_failed_import(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "forked_probe.py").write_text("import json\nraise RuntimeError('half an import')\n")
    server = server_of(environment, tmp_path / "log", "forked_probe")
    processes = [fork(server, "report", environment, tmp_path / name) for name in ("first", "second")]
    for process in processes:
        await process.ended
        process.release()
        assert process.exit_code == 1
    for name in ("first", "second"):
        assert (tmp_path / name).read_text().endswith("RuntimeError: half an import\n")


async def test_a_process_killed_during_the_imports_ends_at_once(environment: dict[str, str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "forked_probe.py").write_text(f"open({str(tmp_path / 'gate')!r}, 'w').read()\n")
    server = server_of(environment, tmp_path / "log", "forked_probe")
    process = fork(server, "report", environment, tmp_path / "first")
    with (tmp_path / "gate").open():  # the import has begun, and goes on no further
        process.kill()
        await process.ended
    assert process.exit_code == -signal.SIGKILL
    process.release()
    assert not server.is_running
    (tmp_path / "forked_probe.py").write_text(MODULE)
    process = fork(server_of(environment, tmp_path / "log", "forked_probe"), "fail", environment, tmp_path / "log")
    await process.ended
    assert process.exit_code == 1
    process.release()


async def test_a_server_ignores_signals_to_a_job_and_its_end_kills_its_processes(
    environment: dict[str, str], tmp_path: Path
) -> None:
    server = server_of(environment, tmp_path / "log")
    processes = [fork(server, "report", environment, tmp_path / "log") for _ in range(2)]
    [parent] = {(await report_of(process))["parent"] for process in processes}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(parent, number)
    third = fork(server, "report", environment, tmp_path / "log")
    assert (await report_of(third))["parent"] == parent
    os.kill(parent, signal.SIGKILL)
    for process in (*processes, third):
        await process.ended
        process.kill()
        assert process.exit_code == -signal.SIGKILL
        assert await asyncio.get_running_loop().sock_recv(process.connection, 1) == b""
        process.release()


async def test_torch_has_the_threads_of_the_process_not_of_the_server(
    environment: dict[str, str], tmp_path: Path
) -> None:
    server = server_of(environment, tmp_path / "log", "torch")
    processes = [
        fork(server, "threads", {**environment, "OMP_NUM_THREADS": number}, tmp_path / "log") for number in "12"
    ]
    reports = [await report_of(process) for process in processes]
    assert reports == [{"threads": number, "sum": float(1 << 20)} for number in (1, 2)]
    for process in processes:
        await process.ended
        process.release()
