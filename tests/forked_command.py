"""Start of `megarl` commands in tests. A server imports the driver's modules once, and forks a process per command.

The command line `[*MEGARL, "train", ...]` has the output, exit code and signal handling of `python -m megarl train
...`. Each run takes about 8 s of processor time less. The command is plain `python -m megarl` in two cases: the test
has no shared fork servers (`shared_fork_servers`), or the current folder has its own copy of megarl.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    # Python puts the folder of this file first, and `python -m` the current one.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megarl.processes.fork_server import ForkedProcess, ForkServer
from tests.shared_fork_servers import SHARED

MEGARL = (sys.executable, __file__)
"""Begin of a command line, in place of `python -m megarl`."""
FORKED_DRIVER = "megarl command"
"""Name of the forked process, as `ps` shows it."""
_ROOT = Path(__file__).resolve().parents[1]
_IMPORTS = ("tests.forked_command", "tests.driver_imports")
_READ_BY_IMPORTS = ("HF_", "HOME", "LANG", "LC_", "LD_", "MKL_", "NUMBA_", "OMP_", "PATH", "PYTHON", "TORCH", "VLLM_")
"""Variables that the server gets, by the beginnings of their names. Commands with other values of them share none."""
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_START_SECONDS = 0.01
"""Interval of looks whether the server has forked the process."""


def main() -> NoReturn:
    """Run the command in a forked process, with the files, signals and exit code of this process."""
    if SHARED not in os.environ or (Path("megarl").exists() and Path.cwd() != _ROOT):
        os.execv(sys.executable, [sys.executable, "-m", "megarl", *sys.argv[1:]])
    # The search path of `python -m`: a recipe's own functions may lie in the current folder.
    sys.path[0] = os.getcwd()
    code = asyncio.run(_exit_code())
    if code < 0:
        with suppress(OSError):
            # SIGKILL has no handler to reset.
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


async def _exit_code() -> int:
    """Fork a process for the command, and return its exit code. Negative: the signal that killed it."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_READ_BY_IMPORTS)}
    with tempfile.TemporaryFile() as log:
        server = ForkServer(variables, _IMPORTS, log)
        process = server.fork(FORKED_DRIVER, "tests.forked_command:run", {}, log)
        _send_task(process)
    while process.pid is None and not process.ended.done():
        await asyncio.sleep(_START_SECONDS)
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, process.signal, number)
    await process.ended
    if process.ended_with_server:
        print("the shared fork server of the tests has died", file=sys.stderr)
    assert process.exit_code is not None
    return process.exit_code


def _send_task(process: ForkedProcess) -> None:
    """Send this process's standard files, arguments and environment to the forked process."""
    # In a file, because an environment may exceed what a socket takes in one message.
    with os.fdopen(os.memfd_create("task"), "w+") as task:
        json.dump({"arguments": sys.argv[1:], "environment": dict(os.environ)}, task)
        task.seek(0)
        socket.send_fds(process.connection, [b"\0"], [0, 1, 2, task.fileno()])


def run(connection: socket.socket) -> None:
    """Run the command of the task that `connection` receives. Called in the forked process."""
    from megarl.cli import main as command

    _, (*files, task), _, _ = socket.recv_fds(connection, 1, 4)
    connection.close()
    for number, descriptor in enumerate(files):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with os.fdopen(task) as text:
        own = json.load(text)
    os.environ.clear()
    os.environ.update(own["environment"])
    sys.argv[:] = ["megarl", *own["arguments"]]
    command()


if __name__ == "__main__":
    main()
