"""A fork server's processes: what they share, what is their own, and how they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Callable, Coroutine
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

def tell(connection):
    print("told")
    names = ("RANK", "TMPDIR", "OMP_NUM_THREADS", "LOCAL_RANK", "MADE_BY_IMPORT")
    told = {name: os.environ.get(name) for name in names}
    told |= {"session": os.getsid(0), "pid": os.getpid(), "parent": os.getppid(), "folder": os.getcwd()}
    told |= {"temporary": tempfile.gettempdir(), "torch": "torch" in sys.modules}
    connection.sendall(json.dumps(told).encode() + b"\\n")
    connection.recv(1)

def leave_with_3(connection):
    sys.exit(3)

def fail(connection):
    raise ValueError("seven")

def leave_a_child(connection):
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    connection.sendall(json.dumps({"child": child.pid}).encode() + b"\\n")

def threads(connection):
    import torch
    told = {"threads": torch.get_num_threads(), "sum": torch.ones(1 << 20).sum().item()}
    connection.sendall(json.dumps(told).encode() + b"\\n")
"""


@pytest.fixture(params=["own", "shared"])
def environment(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The driver's, with a fork server of its own, or with those of this run of the tests."""
    if request.param == "own":
        monkeypatch.delenv(SHARED)
    (tmp_path / "forked_probe.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {**os.environ, "IMPORTED": str(tmp_path / "imported"), "OMP_NUM_THREADS": "2", "LOCAL_RANK": "5"}


def drive(test: Callable[[], Coroutine[None, None, None]]) -> None:
    try:
        asyncio.run(asyncio.wait_for(test(), 240))
    finally:
        end_fork_servers()


def fork(server: ForkServer, name: str, environment: dict[str, str], log: Path) -> ForkedProcess:
    with log.open("ab") as output:
        return server.fork(name, f"forked_probe:{name}", environment, output)


def server_of(environment: dict[str, str], log: Path, *imports: str) -> ForkServer:
    with log.open("ab") as output:
        return fork_server(environment, imports, output)


async def told_by(process: ForkedProcess) -> dict[str, Any]:
    process.connection.setblocking(False)
    text = b""
    while not text.endswith(b"\n"):
        text += await asyncio.get_running_loop().sock_recv(process.connection, 4096)
    while process.pid is None:  # the server may tell it later than the process what it has to
        await asyncio.sleep(0.01)
    return json.loads(text)


def imported(environment: dict[str, str]) -> list[str]:
    return Path(environment["IMPORTED"]).read_text().split()


def test_processes_share_an_import_and_have_all_else_of_their_own(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        environment["MAKES_FILES"] = "1"
        server = server_of(environment, tmp_path / "log", "forked_probe")
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        own = {**environment, "RANK": "1", "TMPDIR": str(tmp_path)}
        first = fork(server, "tell", own, tmp_path / "first")
        del own["LOCAL_RANK"]
        second = fork(server, "tell", {**own, "RANK": "2"}, tmp_path / "second")
        told = [await told_by(process) for process in (first, second)]
        assert [first.pid, second.pid] == [one["pid"] for one in told] == [one["session"] for one in told]
        assert told[0]["parent"] == told[1]["parent"] and len(imported(environment)) == 1
        assert [one["RANK"] for one in told] == ["1", "2"]
        assert [one["LOCAL_RANK"] for one in told] == ["5", None]
        assert {one["MADE_BY_IMPORT"] for one in told} == {None}
        assert not (tmp_path / "made").exists() and not (Path(tempfile.gettempdir()) / "made").exists()
        assert {str(one["OMP_NUM_THREADS"]) for one in told} == {"2"}
        assert {one["temporary"] for one in told} == {str(tmp_path)}
        assert {one["folder"] for one in told} == {str(tmp_path / "other")}
        first.connection.close()
        await first.ended
        assert first.exit_code == 0 and second.exit_code is None
        second.kill()
        await second.ended
        assert second.exit_code == -signal.SIGKILL
        for process in (first, second):
            process.release()
        assert (tmp_path / "first").read_text() == (tmp_path / "second").read_text() == "told\n"
        assert server_of(environment, tmp_path / "log", "forked_probe") is server
        assert server_of({**environment, "OTHER": "1"}, tmp_path / "log", "forked_probe") is not server

    drive(test)


def test_exit_codes_are_those_of_an_interpreter(environment: dict[str, str], tmp_path: Path) -> None:
    async def test() -> None:
        server = server_of(environment, tmp_path / "log")
        processes = [fork(server, name, environment, tmp_path / name) for name in ("leave_with_3", "fail", "unknown")]
        for process in processes:
            await process.ended
            process.release()
        assert [process.exit_code for process in processes] == [3, 1, 1]
        assert (tmp_path / "fail").read_text().endswith("ValueError: seven\n")
        assert len(imported(environment)) == 3  # nothing was asked to be imported before

    drive(test)


def test_what_a_process_left_of_its_group_is_killed(environment: dict[str, str], tmp_path: Path) -> None:
    async def test() -> None:
        server = server_of(environment, tmp_path / "log")
        process = fork(server, "leave_a_child", environment, tmp_path / "log")
        child = (await told_by(process))["child"]
        await process.ended
        assert process.exit_code == 0 and is_alive(child)
        process.release()
        end_fork_servers()
        wait_until(lambda: not is_alive(child), seconds=60)

    drive(test)


def test_a_failed_import_is_met_by_each_process(environment: dict[str, str], tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "forked_probe.py").write_text("import json\nraise RuntimeError('half an import')\n")
        server = server_of(environment, tmp_path / "log", "forked_probe")
        processes = [fork(server, "tell", environment, tmp_path / name) for name in ("first", "second")]
        for process in processes:
            await process.ended
            process.release()
            assert process.exit_code == 1
        for name in ("first", "second"):
            assert (tmp_path / name).read_text().endswith("RuntimeError: half an import\n")

    drive(test)


def test_one_that_is_killed_while_its_server_imports_ends_at_once(environment: dict[str, str], tmp_path: Path) -> None:
    async def test() -> None:
        os.mkfifo(tmp_path / "gate")
        (tmp_path / "forked_probe.py").write_text(f"open({str(tmp_path / 'gate')!r}, 'w').read()\n")
        server = server_of(environment, tmp_path / "log", "forked_probe")
        process = fork(server, "tell", environment, tmp_path / "first")
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

    drive(test)


def test_signals_to_all_of_a_job_leave_the_server_alone_and_its_end_takes_all_along(
    environment: dict[str, str], tmp_path: Path
) -> None:
    async def test() -> None:
        server = server_of(environment, tmp_path / "log")
        processes = [fork(server, "tell", environment, tmp_path / "log") for _ in range(2)]
        [parent] = {(await told_by(process))["parent"] for process in processes}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(parent, number)
        third = fork(server, "tell", environment, tmp_path / "log")
        assert (await told_by(third))["parent"] == parent
        os.kill(parent, signal.SIGKILL)
        for process in (*processes, third):
            await process.ended
            process.kill()
            assert process.exit_code == -signal.SIGKILL
            assert await asyncio.get_running_loop().sock_recv(process.connection, 1) == b""
            process.release()

    drive(test)


def test_torch_has_the_threads_of_the_process_though_the_server_imported_it(
    environment: dict[str, str], tmp_path: Path
) -> None:
    async def test() -> None:
        server = server_of(environment, tmp_path / "log", "torch")
        processes = [
            fork(server, "threads", {**environment, "OMP_NUM_THREADS": number}, tmp_path / "log") for number in "12"
        ]
        told = [await told_by(process) for process in processes]
        assert told == [{"threads": number, "sum": float(1 << 20)} for number in (1, 2)]
        for process in processes:
            await process.ended
            process.release()

    drive(test)
