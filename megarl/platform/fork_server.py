"""Processes that share their imports: a fork server imports modules once and forks a process for each request.

Reading torch, Megatron-Core and vLLM takes most of the time in which a rank starts on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

from megarl.platform import forking
from megarl.platform.server_process import OF_A_PROCESS, SHARED, LentServer, OwnServer, of_imports

_MAX_SERVERS = 2
_END_SECONDS = 1.0
"""Limit for a fork server that ended to be reaped."""
_LEAVE_SECONDS = 10.0
"""Limit for a fork server to kill what is left and to end by itself."""


class ForkServer:
    """A process that has imported `imports` under some environment. It ends with the thread that started it.

    Where drivers share fork servers (`shared_fork_servers`), it is a fork of one of them, and ends with this process.
    """

    def __init__(self, environment: Mapping[str, str], imports: Sequence[str], log: BinaryIO) -> None:
        """Starts it; its output while it imports goes to `log`."""
        address = os.environ.get(SHARED)
        if address is None:
            self._process = OwnServer(environment, sys.path, imports, log)
        else:
            self._process = LentServer(address, environment, sys.path, imports, log)
        self._num_forked = 0
        self._is_closed = False
        self.is_ready = False
        """Whether it is known to have imported all."""

    @property
    def is_running(self) -> bool:
        return self._process.ended() is None

    @property
    def is_unused(self) -> bool:
        """Whether all that it forked has been released."""
        return self._num_forked == 0

    def exit_code(self) -> int:
        """How a server that closed its connections ended; negative: the signal that killed it."""
        code = self._process.ended(_END_SECONDS)
        return -signal.SIGKILL if code is None else code

    def fork(self, name: str, function: str, environment: Mapping[str, str], log: BinaryIO) -> ForkedProcess:
        """A process that runs `function`, `package.module:name`, on a connection; what it prints goes to `log`.

        `ps` and `top` show 15 characters of its name. Of `environment` it gets the variables of a single process; the
        others are the server's.
        """
        request = {
            "name": name,
            "function": function,
            "environment": {variable: environment[variable] for variable in OF_A_PROCESS & environment.keys()},
            "unset": sorted(OF_A_PROCESS - environment.keys()),
            "path": sys.path,
            "folder": os.getcwd(),
        }
        connection, theirs = socket.socketpair()
        status, their_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, their_status:
            descriptors = [theirs.fileno(), their_status.fileno(), log.fileno()]
            socket.send_fds(self._process.requests, [json.dumps(request).encode()], descriptors)
        self._num_forked += 1
        return ForkedProcess(self, connection, status)

    def kill(self) -> None:
        """Kill the server and with it all that it forked."""
        self._process.kill()

    def forget(self) -> None:
        """One process that it forked has been released."""
        self._num_forked -= 1
        self._end_unused()

    def close(self) -> None:
        """End the server, once all that it forked has been released."""
        self._is_closed = True
        self._end_unused()

    def end(self) -> None:
        """Let the server kill what is left of the groups that were released, and end; kill it if it does not."""
        if self.is_ready:
            with suppress(OSError):
                self._process.requests.shutdown(socket.SHUT_WR)
            self._process.ended(_LEAVE_SECONDS)
        self.kill()

    def _end_unused(self) -> None:
        if self._is_closed and self.is_unused:
            self.end()


class ForkedProcess:
    """A process of a fork server, leader of a session of its own; its id stays its own until `release`."""

    def __init__(self, server: ForkServer, connection: socket.socket, status: socket.socket) -> None:
        self.connection = connection
        self.pid: int | None = None
        self.exit_code: int | None = None
        """None while it runs; negative: the signal that killed it."""
        self.ended_with_server = False
        """Whether the fork server ended and took this process with it; `exit_code` is then the server's."""
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Done with the time when the process has ended."""
        self._server = server
        self._status = status
        status.setblocking(False)
        asyncio.get_running_loop().add_reader(status, self._read_status)

    def _read_status(self) -> None:
        try:
            message = self._status.recv(forking.STATUS.size)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message and self.pid is None:
            (self.pid,) = forking.STATUS.unpack(message)
            self._server.is_ready = True
            return
        # Without a message the server has ended, and all that it forked with it.
        self.ended_with_server = not message
        self.exit_code = forking.STATUS.unpack(message)[0] if message else self._server.exit_code()
        asyncio.get_running_loop().remove_reader(self._status)
        self.ended.set_result(time.time())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it has been forked and still runs."""
        if self.pid is not None and self.exit_code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, if it still runs, and what is left of its group."""
        if self.pid is not None:
            # Not by the server, which ends with the driver: the driver may end next. While the server runs, the id is
            # its own until `release`.
            if self._server.is_running:
                forking.kill_group(self.pid)
            return
        if self._server.is_ready:
            with suppress(OSError):
                self._status.shutdown(socket.SHUT_WR)
            return
        self._server.kill()  # it would only take notice when all is imported
        with suppress(OSError):
            self._status.shutdown(socket.SHUT_RDWR)  # nor would a shared one close its end before

    def release(self) -> None:
        """Close the connection and let the server reap the process."""
        asyncio.get_running_loop().remove_reader(self._status)
        self._status.close()
        self.connection.close()
        self._server.forget()


_servers: dict[object, ForkServer] = {}


def fork_server(environment: Mapping[str, str], imports: Sequence[str], log: BinaryIO) -> ForkServer:
    """A fork server of this thread that has imported these modules under these variables, as they are read there.

    One that is there already is taken: ranks that are started again, or other ones, import nothing anew.
    """
    variables = sorted(of_imports(environment).items())
    shared = os.environ.get(SHARED)
    key = (threading.get_native_id(), shared, tuple(variables), tuple(sys.path), tuple(imports))
    server = _servers.pop(key, None)
    if server is None or not server.is_running:
        server = ForkServer(environment, imports, log)
    _servers[key] = server
    while len(_servers) > _MAX_SERVERS:
        _servers.pop(next(iter(_servers))).close()
    return server


def end_fork_servers(*, is_all: bool = True) -> None:
    """End all fork servers, and what they forked with them; or only those without a process."""
    for key, server in list(_servers.items()):
        if is_all or server.is_unused:
            del _servers[key]
            server.end()
