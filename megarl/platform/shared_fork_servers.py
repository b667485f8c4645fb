"""Fork servers that drivers share: those that run one after another, or side by side, import modules once.

A process in between starts a server for each set of modules, search path and variables that drivers ask for. For each
driver that server forks another, which forks what the driver asks for and ends with it. All end with the process that
shares them.
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

from megarl.platform.private_folder import PrivateFolder
from megarl.platform.processes import ENDING_SIGNALS, die_with
from megarl.platform.server_process import SHARED, OwnServer, is_own, short_address

_MAX_SERVERS = 4
_MAX_REQUEST_BYTES = 1 << 20
_REQUEST_SECONDS = 10.0
"""Limit for a driver that has connected to say what it wants."""
_END_SECONDS = 20.0
"""Limit for the process in between to end the servers; it is killed then, and they with it."""
_PROCESS = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from megarl.platform.shared_fork_servers import share
share(*sys.argv[2:])
"""


@contextmanager
def shared_fork_servers() -> Iterator[None]:
    """Within, the drivers that this thread or what it starts makes share their fork servers, by the variable `SHARED`.

    Processes of this user alone are served. The servers keep what they have imported: code that changes meanwhile is
    not read again.
    """
    folder = PrivateFolder()
    address = folder.path / "fork_servers"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with short_address(address) as short:
            listener.bind(short)
        listener.listen(128)
        number = listener.fileno()
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
            process.communicate(timeout=_END_SECONDS)  # closes its standard input, by which it knows
        process.kill()
        process.wait()
        folder.remove()


def share(number: str, owner: str) -> NoReturn:
    """The process in between: lends servers to all who connect to the listening socket of that descriptor.

    Ends them, and itself, once its standard input is closed.
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
        # A driver that goes away or sends anything else has its connection closed, by which it knows.
        with connection, suppress(OSError, ValueError, LookupError, TypeError):
            lender.serve(connection)
    for server in lender.servers.values():
        server.kill()
    os._exit(0)


@dataclass(slots=True)
class _Lender:
    servers: dict[str, OwnServer] = field(default_factory=dict)
    """By what was asked for; the one that was asked for last is the last."""

    def serve(self, connection: socket.socket) -> None:
        """Pass a driver's connection on to the server that it asks for."""
        if not is_own(connection):
            return
        connection.settimeout(_REQUEST_SECONDS)
        content, descriptors, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 1)
        connection.settimeout(None)  # what is passed on is blocking or not for all who have it
        with os.fdopen(descriptors[0], "wb") as log:
            server = self._server(content.decode(), log)
        socket.send_fds(server.requests, [b"\0"], [connection.fileno()])

    def _server(self, wanted: str, log: BinaryIO) -> OwnServer:
        server = self.servers.pop(wanted, None)
        if server is None or server.ended() is not None:
            server = OwnServer(**json.loads(wanted), log=log, function="lend")
        self.servers[wanted] = server
        while len(self.servers) > _MAX_SERVERS:
            # It ends when all that it has lent have ended.
            self.servers.pop(next(iter(self.servers))).requests.close()
        return server
