"""Fork servers shared by several drivers: consecutive or concurrent drivers import modules only once.

A broker process starts one server for each requested set of modules, search path and variables. For each driver this
server forks a copy of itself. The copy forks the driver's processes and ends with the driver. All end with the process
that called `shared_fork_servers`. Drivers load this file by its path (`fork_server.SERVER_MAKER`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from megarl.files.private_folder import PrivateFolder
from megarl.processes.fork_server import SERVER_MAKER, ForkServerProcess, ServerHandle, import_variables
from megarl.processes.fork_server_main import begin, fork_on_request
from megarl.processes.launcher import python_call
from megarl.processes.process_tree import ENDING_SIGNALS, die_with
from megarl.types import ConfigError

SHARED = "MEGARL_FORK_SERVERS"
"""Environment variable with the broker's address. A driver without it starts servers of its own."""
_ROOT = str(Path(__file__).resolve().parents[1])
_MODULE = "tests.shared_fork_servers"
_MAX_SERVERS = 6
"""Servers retained by the broker. The least recently requested one is closed beyond this number."""
_MAX_REQUEST_BYTES = 1 << 20
"""Largest request in bytes. It holds the driver's environment and search path as JSON."""
_REQUEST_SECONDS = 10.0
"""Seconds for a driver to send its request after it connected."""
_END_SECONDS = 20.0
"""Seconds for the broker to end its servers. It is then killed, and its servers die with it."""
_LATE = ("MEGARL_TEST_RUN", "PATH", "PYTEST_")
"""Begin of names of variables that no import reads. A driver's server gets its values after it was forked."""
_CREDENTIALS = struct.Struct("3i")
"""The kernel's `struct ucred`: process id, user id, group id (unix(7))."""


@contextmanager
def shared_fork_servers() -> Iterator[None]:
    """Share fork servers, inside the block, among drivers started by this thread or by its child processes.

    Child processes find the broker through environment variables. Only processes of this user are served.
    Servers never import a module again, so changes of code inside the block have no effect.
    """
    folder = PrivateFolder()
    address = folder.path / "fork_servers"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with short_address(address) as short:
            listener.bind(short)
        listener.listen(128)
        number = listener.fileno()
        # A session of its own keeps Ctrl-C away.
        process = subprocess.Popen(
            python_call(f"{_MODULE}:share", str(number), str(os.getpid()), path=[*sys.path, _ROOT]),
            pass_fds=[number],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    own = {SHARED: str(address), SERVER_MAKER: f"{_ROOT}/tests/shared_fork_servers.py:make_server"}
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
        os.environ.update(before)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_SECONDS)  # Closes its standard input: the signal to end.
        process.kill()
        process.wait()
        folder.remove()


def share(number: str, owner: str) -> NoReturn:
    """Run the broker: give a server to each driver that connects to the listening socket `number`.

    `number` is a file descriptor, `owner` the process id of the parent. Exits, with all servers, once standard input is
    closed.
    """
    die_with(int(owner))
    for ending in ENDING_SIGNALS:
        signal.signal(ending, signal.SIG_IGN)
    lender = _Lender()
    listener = socket.socket(fileno=int(number))
    poll = select.poll()
    for descriptor in (listener.fileno(), sys.stdin.fileno()):
        poll.register(descriptor, select.POLLIN)
    while sys.stdin.fileno() not in dict(poll.poll()):
        connection, _ = listener.accept()
        # One bad driver must not end the broker. The closed connection reports the failure to a driver that still runs.
        with connection, suppress(OSError, ValueError, LookupError, TypeError):
            lender.serve(connection)
    for server in lender.servers.values():
        server.kill()
    os._exit(0)


@dataclass(slots=True)
class _Lender:
    """The servers of the broker."""

    servers: dict[str, ForkServerProcess] = field(default_factory=dict)
    """Servers by their request (JSON text), in the order of last use."""

    def serve(self, connection: socket.socket) -> None:
        """Pass a driver's connection on to the requested server. Ignore connections of other users."""
        if not is_own(connection):
            return
        connection.settimeout(_REQUEST_SECONDS)
        content, descriptors, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 1)
        # A timeout makes the socket non-blocking, and all processes holding the descriptor share this mode.
        connection.settimeout(None)
        with os.fdopen(descriptors[0], "wb") as log:
            server = self._server(content.decode(), log)
        socket.send_fds(server.requests, [b"\0"], [connection.fileno()])

    def _server(self, wanted: str, log: BinaryIO) -> ForkServerProcess:
        server = self.servers.pop(wanted, None)
        if server is None or server.exit_code() is not None:
            server = _server_process(json.loads(wanted), log)
        self.servers[wanted] = server
        while len(self.servers) > _MAX_SERVERS:
            # A closed request socket lets the server finish: it exits after all its copies for drivers have ended.
            self.servers.pop(next(iter(self.servers))).requests.close()
        return server


def _server_process(wanted: Mapping[str, Any], log: BinaryIO) -> ForkServerProcess:
    """Start a server for a request."""
    # With the broker's late variables, such as the mark of the run of tests that its processes belong to.
    environment = late_variables(os.environ) | wanted["environment"]
    return ForkServerProcess(**{**wanted, "environment": environment}, log=log, function=f"{_MODULE}:lend")


def late_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in which the drivers of one server may differ."""
    return {name: value for name, value in environment.items() if name.startswith(_LATE)}


def lend(number: str, owner: str, *modules: str) -> Callable[[], object]:
    """Import the modules, then fork one server per driver. Return only in processes forked by these: their function.

    `number` is the file descriptor of a socket. It receives the connections of drivers. `owner` is the process id of
    their sender.
    """
    begin(int(owner), modules)
    for ending in ENDING_SIGNALS:
        signal.signal(ending, signal.SIG_IGN)
    # With SIGCHLD ignored the kernel reaps the servers: nobody reads their exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connections = socket.socket(fileno=int(number))
    own = os.getpid()
    while True:
        content, descriptors, _, _ = socket.recv_fds(connections, 1, 1)
        if not content:
            break
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            connections.close()
            die_with(own)
            driver, _ = credentials(connection)
            # `ps` shows the driver's process id as the name of its server.
            Path("/proc/self/comm").write_text(f"megarl {driver}")
            _end_with(driver, connection)
            _set_late_variables(connection)
            return fork_on_request(connection)
        connection.close()
    with suppress(ChildProcessError):
        # With SIGCHLD ignored, wait() returns only after all children have ended (wait(2)).
        os.wait()
    os._exit(0)


def _end_with(driver: int, connection: socket.socket) -> None:
    """Fork a process that cuts this server's connection when its driver ends. Exit if the driver has ended already.

    The end of the driver does not close the connection while a child process of the driver holds it open.
    """
    try:
        pidfd = os.pidfd_open(driver)
    except ProcessLookupError:
        os._exit(0)
    server = os.getpid()
    if os.fork() == 0:
        die_with(server)
        select.select([pidfd], [], [])
        connection.shutdown(socket.SHUT_RDWR)
        os._exit(0)
    os.close(pidfd)


def _set_late_variables(connection: socket.socket) -> None:
    """Receive the late variables of this server's driver. Exit if the driver has ended."""
    content = connection.recv(_MAX_REQUEST_BYTES)
    if not content:
        os._exit(0)
    for name in late_variables(os.environ):
        del os.environ[name]
    os.environ.update(json.loads(content))


def make_server(
    environment: Mapping[str, str], path: Sequence[str], imports: Sequence[str], log: BinaryIO
) -> ServerHandle:
    """Return a shared server, or one of this driver's own if `SHARED` is not set."""
    address = os.environ.get(SHARED)
    if address is None:
        return ForkServerProcess(environment, path, imports, log)
    return LentServer(address, environment, path, imports, log)


class LentServer:
    """A server forked for this driver by a shared server, as soon as the shared one has finished its imports."""

    pid: int | None = None

    def __init__(
        self, address: str, environment: Mapping[str, str], path: Sequence[str], imports: Sequence[str], log: BinaryIO
    ) -> None:
        """Request a server at the socket `address`. Raises ConfigError if nobody, or another user, listens there."""
        variables = import_variables(environment)
        late = late_variables(variables)
        wanted = {
            "environment": {name: value for name, value in variables.items() if name not in late},
            "path": _shared_path(path, imports),
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
            # Read by the server that is forked for this driver.
            self.requests.send(json.dumps(late).encode())
        except OSError as error:
            self.requests.close()
            raise ConfigError(f"{SHARED} = {address}: there are no shared fork servers ({error}); unset it") from None

    def exit_code(self, seconds: float = 0.0) -> int | None:
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


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end of a socket, as reported by the kernel."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


def is_own(connection: socket.socket) -> bool:
    """Return whether a process of this user is at the other end of a socket."""
    return credentials(connection)[1] == os.getuid()


def _shared_path(path: Sequence[str], imports: Sequence[str]) -> list[str]:
    """Return the search path without the folders that `imports` do not need, such as a test's own.

    Drivers with different folders can then share a server. Each forked process gets its own driver's path. This
    repository comes before Python's folders: an installed megarl may be another checkout. It stays behind a changed
    copy of the package that the driver has before it.
    """
    packages = {module.partition(".")[0] for module in imports}
    files = [name for package in packages for name in (package, f"{package}.py")]
    repository = next((index for index, entry in enumerate(path) if _is_repository(entry)), len(path))
    first: list[str] = []
    rest: list[str] = []
    for index, entry in enumerate(path):
        folder = Path(entry).absolute()
        # An entry without a folder is an archive, or the name of an import hook.
        is_of_python = not folder.is_dir() or any(map(folder.is_relative_to, (sys.prefix, sys.base_prefix)))
        if is_of_python:
            rest.append(entry)
        elif not _is_repository(entry) and any((folder / name).exists() for name in files):
            (first if index < repository else rest).append(entry)
    return [*first, _ROOT, *rest]


def _is_repository(entry: str) -> bool:
    return Path(entry).absolute() == Path(_ROOT)
