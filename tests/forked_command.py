"""Start of `megarl` commands in tests. A server imports the driver's modules once, and forks a process per command.

The command line `[*MEGARL, "train", ...]` has the output, exit code and signal handling of `python -m megarl train
...`. Each run takes about 8 s of processor time less. The command is plain `python -m megarl` in two cases: the test
has no shared fork servers (`shared_fork_servers`), or the current folder has its own copy of megarl.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    # Python puts the folder of this file first, and `python -m` the current one.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megarl.processes.fork_server_main import STATUS
from tests.shared_fork_servers import SHARED, LentServer

MEGARL = (sys.executable, __file__)
"""Begin of a command line, in place of `python -m megarl`."""
FORKED_DRIVER = "megarl command"
"""Name of the forked process, as `ps` shows it."""
_ROOT = Path(__file__).resolve().parents[1]
_IMPORTS = (__name__ if __name__ != "__main__" else "tests.forked_command", "tests.driver_imports")
_READ_BY_IMPORTS = ("HF_", "HOME", "LANG", "LC_", "LD_", "MKL_", "NUMBA_", "OMP_", "PATH", "PYTHON", "TORCH", "VLLM_")
"""Variables that the server gets, by the beginnings of their names. Commands with other values of them share none."""
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_MAX_TASK_BYTES = 1 << 17
"""Largest task in bytes: arguments and environment as JSON."""


def main() -> NoReturn:
    """Run the command in a forked process, with the files, signals and exit code of this process."""
    address, arguments = os.environ.get(SHARED), sys.argv[1:]
    if address is None or (Path("megarl").exists() and Path.cwd() != _ROOT):
        os.execv(sys.executable, [sys.executable, "-m", "megarl", *arguments])
    variables = {name: value for name, value in os.environ.items() if name.startswith(_READ_BY_IMPORTS)}
    # The search path of `python -m`, for the functions of a user beside the recipe.
    path = [os.getcwd(), *sys.path[1:]]
    with tempfile.TemporaryFile() as log:
        server = LentServer(address, variables, path, _IMPORTS, log)
    status = _begin(server, path, {"arguments": arguments, "environment": dict(os.environ)})
    forked = _next(status)
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: os.kill(forked, number))
    code = _next(status)
    if code < 0:
        with suppress(OSError):
            # SIGKILL has no handler to reset.
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _begin(server: LentServer, path: list[str], task: dict[str, Any]) -> socket.socket:
    """Have the server fork a process for a task. Returns the socket that reports its id and then its exit code."""
    request = {
        "name": FORKED_DRIVER,
        "function": "tests.forked_command:run",
        "environment": {},
        "unset": [],
        "path": path,
        "folder": os.getcwd(),
    }
    connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    status, their_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (connection, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_TASK_BYTES)
    with theirs, their_status, connection:
        descriptors = [theirs.fileno(), their_status.fileno(), sys.stderr.fileno()]
        socket.send_fds(server.requests, [json.dumps(request).encode()], descriptors)
        socket.send_fds(connection, [json.dumps(task).encode()], [0, 1, 2])
    return status


def _next(status: socket.socket) -> int:
    """Wait for the next number of a status socket. Exits with 70 if the server has died."""
    message = status.recv(STATUS.size)
    if not message:
        print("the shared fork server of the tests has died", file=sys.stderr)
        sys.exit(70)
    return STATUS.unpack(message)[0]


def run(connection: socket.socket) -> None:
    """Run the command of the task that `connection` receives. Called in the forked process."""
    from megarl.cli import main as command

    content, descriptors, _, _ = socket.recv_fds(connection, _MAX_TASK_BYTES, 3)
    connection.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    task = json.loads(content)
    os.environ.clear()
    os.environ.update(task["environment"])
    sys.argv[:] = ["megarl", *task["arguments"]]
    command()


if __name__ == "__main__":
    main()
