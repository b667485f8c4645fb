"""The process of a fork server, as its driver has it: one of its own, or one that drivers share."""

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
"""The variable that names the socket of `shared_fork_servers`; without it each driver has servers of its own."""
OF_A_PROCESS = frozenset(
    {"TMPDIR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST"}
)
"""Variables that no import reads: a process is given its own when it is forked."""
_CREDENTIALS = struct.Struct("3i")
_SERVER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from megarl.platform.forking import {0} as serve
run = serve(*sys.argv[2:])
run()
"""


class OwnServer:
    """A server that ends with the thread that started it. `requests` is the socket to it."""

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
        """Starts it, to import modules and run that function of `forking`; its output meanwhile goes to `log`."""
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        temporary = {"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}
        code = _SERVER.format(function)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                # -P: the folder of the script or the current one must not come before the search path.
                [executable, "-P", "-c", code, json.dumps(path), str(number), str(os.getpid()), *imports],
                # With one thread OpenMP and BLAS make no pool of threads, which a fork would not copy.
                env={**of_imports(environment), **temporary, "OMP_NUM_THREADS": "1"},
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self, seconds: float = 0.0) -> int | None:
        """How it ended, negative: the signal that killed it; None: within this time it did not."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill it."""
        self.requests.close()
        self._process.kill()
        self._process.wait()


class LentServer:
    """A server that a shared one forks for this driver, as soon as that has imported all."""

    def __init__(
        self, address: str, environment: Mapping[str, str], path: Sequence[str], imports: Sequence[str], log: BinaryIO
    ) -> None:
        """Asks for it. Raises ConfigError where nobody listens, or another user."""
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
                raise PermissionError("another user listens there")
            socket.send_fds(self.requests, [json.dumps(wanted, sort_keys=True).encode()], [log.fileno()])
        except OSError as error:
            self.requests.close()
            raise ConfigError(f"{SHARED} = {address}: there are no shared fork servers ({error}); unset it") from None

    def ended(self, seconds: float = 0.0) -> int | None:
        """As of an `OwnServer`; nobody tells how it ended, and it counts as killed."""
        if self.requests.fileno() < 0:
            return -signal.SIGKILL
        poll = select.poll()
        # It sends nothing: only its end can be read.
        poll.register(self.requests, select.POLLIN)
        return -signal.SIGKILL if poll.poll(1000 * seconds) else None

    def kill(self) -> None:
        """Let go of it: it kills all that it forked, and ends."""
        with suppress(OSError):
            self.requests.shutdown(socket.SHUT_RDWR)  # another process may have the socket too
        self.requests.close()


@contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Within, the path of a socket in less than the 108 bytes that the kernel takes, whatever its folder."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are fixed once modules are imported."""
    return {name: value for name, value in environment.items() if name not in OF_A_PROCESS}


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a socket, as the kernel knows them."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


def is_own(connection: socket.socket) -> bool:
    """Whether the same user is at the other end of a socket."""
    return credentials(connection)[1] == os.getuid()


def _without_current_folder(path: Sequence[str], imports: Sequence[str]) -> list[str]:
    """The search path without the folder that `python -m` puts first, unless what is imported lies there.

    Drivers in different folders then share a server. Each process that it forks has the path of its driver.
    """
    first = Path(path[0] if path else "")
    packages = {module.partition(".")[0] for module in imports}
    is_needed = any((first / name).exists() for package in packages for name in (package, f"{package}.py"))
    return list(path[1:] if path and first.absolute() == Path.cwd() and not is_needed else path)
