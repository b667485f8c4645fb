"""Handles of a driver to its fork server's process: a server of its own, or a shared one."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

from megarl.types import ConfigError

SHARED = "MEGARL_FORK_SERVERS"
"""Environment variable with the socket path of `shared_fork_servers`. Without it each driver starts its own servers."""
OF_A_PROCESS = frozenset(
    {"TMPDIR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST"}
)
"""Variables set for each forked process. No import reads them, so they may differ from the server's."""
_CREDENTIALS = struct.Struct("3i")
"""The kernel's `struct ucred`: process id, user id, group id (unix(7))."""
_SERVER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from megarl.processes.fork_server_main import {0} as serve
run = serve(*sys.argv[2:])
run()
"""


class OwnServer:
    """A fork server of this driver. It ends with the thread that started it. `requests` is the socket to it."""

    def __init__(
        self,
        environment: Mapping[str, str],
        path: Sequence[str],
        imports: Sequence[str],
        log: BinaryIO,
        *,
        executable: str = sys.executable,
        function: Literal["serve", "lend"] = "serve",
    ) -> None:
        """Start a server: it imports `imports`, then runs `function` of the module `forking`.

        Its output during the imports goes to `log`.
        """
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        temporary = {"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}
        code = _SERVER.format(function)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                # -P: neither the script's folder nor the current one may come before the search path.
                [executable, "-P", "-c", code, json.dumps(path), str(number), str(os.getpid()), *imports],
                # With one thread, OpenMP and BLAS create no thread pool. A fork would not copy a pool's threads.
                env={**of_imports(environment), **temporary, "OMP_NUM_THREADS": "1"},
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self, seconds: float = 0.0) -> int | None:
        """Wait up to `seconds` for the server's end. Return its exit code (negative: a signal), or None if it runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the server and reap it."""
        self.requests.close()
        self._process.kill()
        self._process.wait()


class LentServer:
    """A server forked for this driver by a shared server, as soon as the shared one has finished its imports."""

    def __init__(
        self, address: str, environment: Mapping[str, str], path: Sequence[str], imports: Sequence[str], log: BinaryIO
    ) -> None:
        """Request a server at the socket `address`. Raises ConfigError if nobody, or another user, listens there."""
        wanted = {
            "environment": of_imports(environment),
            "path": _without_current_folder(path, imports),
            "imports": list(imports),
            "executable": sys.executable,
        }
        self.requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with short_address(Path(address)) as short:
                self.requests.connect(short)
            if not is_own(self.requests):
                raise PermissionError("the server at this address belongs to another user")
            socket.send_fds(self.requests, [json.dumps(wanted, sort_keys=True).encode()], [log.fileno()])
        except OSError as error:
            self.requests.close()
            raise ConfigError(f"{SHARED} = {address}: there are no shared fork servers ({error}); unset it") from None

    def ended(self, seconds: float = 0.0) -> int | None:
        """Wait up to `seconds` for the server's end. Return -SIGKILL after its end, or None if it runs.

        The true exit code is unknown, because the server is not a child of this process.
        """
        if self.requests.fileno() < 0:
            return -signal.SIGKILL
        poll = select.poll()
        # The server never writes to this socket, so readable means closed.
        poll.register(self.requests, select.POLLIN)
        return -signal.SIGKILL if poll.poll(1000 * seconds) else None

    def kill(self) -> None:
        """Close the socket, so that the server kills its processes and exits."""
        with suppress(OSError):
            # close() alone has no effect while another process holds the socket too.
            self.requests.shutdown(socket.SHUT_RDWR)
        self.requests.close()


@contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Yield an alias of a socket's path, valid inside the block and short enough for the kernel's 108 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables fixed by the imports: all except `OF_A_PROCESS`."""
    return {name: value for name, value in environment.items() if name not in OF_A_PROCESS}


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end of a socket, as reported by the kernel."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


def is_own(connection: socket.socket) -> bool:
    """Return whether a process of this user is at the other end of a socket."""
    return credentials(connection)[1] == os.getuid()


def _without_current_folder(path: Sequence[str], imports: Sequence[str]) -> list[str]:
    """Return the search path without the current folder, put first by `python -m`. Keep it if `imports` need it.

    Drivers in different folders can then share a server. Each forked process gets its own driver's path.
    """
    first = Path(path[0] if path else "")
    packages = {module.partition(".")[0] for module in imports}
    is_needed = any((first / name).exists() for package in packages for name in (package, f"{package}.py"))
    return list(path[1:] if path and first.absolute() == Path.cwd() and not is_needed else path)
