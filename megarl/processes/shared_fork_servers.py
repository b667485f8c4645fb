"""Fork servers shared by several drivers: consecutive or concurrent drivers import modules only once.

A broker process starts one server for each requested set of modules, search path and variables. For each driver this
server forks a copy of itself. The copy forks the driver's processes and ends with the driver. All end with the process
that called `shared_fork_servers`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import BinaryIO, NoReturn

from megarl.files.private_folder import PrivateFolder
from megarl.processes.fork_server_handle import SHARED, OwnServer, is_own, short_address
from megarl.processes.process_tree import ENDING_SIGNALS, die_with

_MAX_SERVERS = 4
"""Servers retained by the broker. The least recently requested one is closed beyond this number."""
_MAX_REQUEST_BYTES = 1 << 20
"""Largest request in bytes. It holds the driver's environment and search path as JSON."""
_REQUEST_SECONDS = 10.0
"""Seconds for a driver to send its request after it connected."""
_END_SECONDS = 20.0
"""Seconds for the broker to end its servers. It is then killed, and its servers die with it."""
_PROCESS = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from megarl.processes.shared_fork_servers import share
share(*sys.argv[2:])
"""


@contextmanager
def shared_fork_servers() -> Iterator[None]:
    """Share fork servers, inside the block, among drivers started by this thread or by its child processes.

    Child processes find the broker through the environment variable `SHARED`. Only processes of this user are served.
    Servers never import a module again, so changes of code inside the block have no effect.
    """
    folder = PrivateFolder()
    address = folder.path / "fork_servers"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with short_address(address) as short:
            listener.bind(short)
        listener.listen(128)
        number = listener.fileno()
        # -P: the current folder must not come before the search path. A session of its own keeps Ctrl-C away.
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROCESS, json.dumps(sys.path), str(number), str(os.getpid())],
            pass_fds=[number],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    before = os.environ.get(SHARED)
    os.environ[SHARED] = str(address)
    try:
        yield
    finally:
        del os.environ[SHARED]
        if before is not None:
            os.environ[SHARED] = before
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_SECONDS)  # closes its standard input: the signal to end
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

    servers: dict[str, OwnServer] = field(default_factory=dict)
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

    def _server(self, wanted: str, log: BinaryIO) -> OwnServer:
        server = self.servers.pop(wanted, None)
        if server is None or server.ended() is not None:
            server = OwnServer(**json.loads(wanted), log=log, function="lend")
        self.servers[wanted] = server
        while len(self.servers) > _MAX_SERVERS:
            # A closed request socket lets the server finish: it exits after all its copies for drivers have ended.
            self.servers.pop(next(iter(self.servers))).requests.close()
        return server
