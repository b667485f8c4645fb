"""HTTP server of the driver. Clients without a key cannot exhaust its file descriptors or fill its log."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import socket
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megarl.processes.listening import host_in_url, taken_text
from megarl.types import ConfigError

STRANGERS = 64
"""Connections without a known key that may be open at a time, besides `max_connections` with one."""
HEAD_SECONDS = 10.0
"""Seconds in which a new connection must send the head of a request with a known key; else it is closed."""
_IDLE_SECONDS = 75.0
"""Seconds from an answer until the head of the next request must be complete. Most clients keep a connection open for a
few seconds between their requests.
"""
_UNREAD_SECONDS = 30
"""Seconds after which the kernel closes a connection whose client does not read its answer."""
SPARE_FILES = 128
"""File descriptors that connections leave free, because ranks, logs and checkpoints need them."""
_CLOSE_SECONDS = 2.0
"""Seconds to wait for the client to close a connection that ends with its answer."""
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8
"""Connection states: reset or closed by the other side (Linux, net/tcp_states.h). The first byte of TCP_INFO has the
state.
"""
_PAUSE_SECONDS = 0.5
"""Seconds without accepting connections, after file descriptors ran out."""
_BACKLOG = 4096
"""Connections that wait in the kernel until they are accepted; Linux's own maximum (net.core.somaxconn).

Beyond it the kernel drops packets of new clients, so their requests arrive seconds after their connections. Meanwhile
the server closes these connections as silent. It happened with 2,000 clients at a time and asyncio's default, 100.
"""
_LOGGED_A_MINUTE = 10
"""Maximum log records of one server per minute. The next record states the number of dropped ones."""


class HttpServer:
    """HTTP server of an application. It counts a connection on accept, before it reads anything.

    A connection is a stranger until `admit` is called for one of its requests. At most `max_connections` are admitted.
    Strangers may use the part of this number that is free, and `STRANGERS` connections more. Beyond that, a new
    connection replaces the oldest stranger, so a client that sends its request at once is served.
    """

    def __init__(self, app: web.Application, *, section: str, max_connections: int, **settings: Any) -> None:
        """Prepare the server. `section` is its section of the recipe. `settings` are passed to aiohttp's runner."""
        self._section, self._max_connections = section, max_connections
        self._log = _make_server_log(section)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=self._log,
            keepalive_timeout=_IDLE_SECONDS,
            # The run has its own signal handlers.
            handle_signals=False,
            **settings,
        )
        self._open_connections = _OpenConnections({}, set())
        self._listeners: list[socket.socket] = []
        self._accept_tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int, *, is_held: bool = False) -> str:
        """Listen at an address, and return the base URL. Port 0 takes any free port.

        `is_held`: clients wait in the kernel until `accept` is called. If the address is taken, close the server and
        raise ConfigError.
        """
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            # asyncio finds and binds the addresses. It must not accept, because it accepts without limit.
            asyncio_server = await loop.create_server(self._make_connection, host, port, start_serving=False)
            self._listeners = [listener.dup() for listener in asyncio_server.sockets]
            asyncio_server.close()
            for listener in self._listeners:
                listener.setblocking(False)
                listener.listen(_BACKLOG)
        except OSError as error:
            await self.close()
            reason = error.strerror or str(error)
            raise ConfigError(f"{self._section}.port = {port}: {taken_text(host, port, reason)}") from error
        if not is_held:
            self.accept()
        return f"http://{host_in_url(host)}:{self._listeners[0].getsockname()[1]}"

    def accept(self) -> None:
        if not self._accept_tasks:
            self._accept_tasks = [
                asyncio.create_task(self._accept_connections(listener)) for listener in self._listeners
            ]

    async def close(self) -> None:
        """Stop accepting, then end the open connections."""
        for task in self._accept_tasks:
            task.cancel()
        if self._accept_tasks:
            await asyncio.wait(self._accept_tasks)
        for listener in self._listeners:
            listener.close()
        await self._runner.cleanup()

    def admit(self, request: web.Request) -> bool:
        """Count a connection whose request has a known key. Returns False if `max_connections` is reached."""
        connection = None if request.transport is None else request.transport.get_protocol()
        if isinstance(connection, _Connection):
            # A client sends its next request only after it has read the last answer.
            connection.on_unread = None
        # Do not count a closed connection, or count one twice.
        if not isinstance(connection, _Connection) or connection not in self._open_connections.strangers:
            return True
        if len(self._open_connections.admitted) >= self._max_connections:
            return False
        connection.admit()
        return True

    async def watch_delivery(self, request: web.Request, on_unread: Callable[[], object]) -> None:
        """Raise ConnectionResetError if the client of a written answer is gone. Close a connection without keep-alive.

        From now on, `on_unread` is called if the connection ends before the client has read the whole answer.
        """
        transport = request.transport
        connection = None if transport is None else transport.get_protocol()
        if transport is None or transport.is_closing() or not isinstance(connection, _Connection):
            raise ConnectionResetError("the client closed the connection before it had read the answer")
        # Ask the kernel: asyncio reports the end of a connection only later.
        [state] = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if state == _TCP_CLOSE or (state == _TCP_CLOSE_WAIT and _has_unacknowledged_bytes(transport)):
            raise ConnectionResetError("the client closed the connection before it had read the answer")
        connection.on_unread = on_unread
        if not request.keep_alive:
            # Half-close: after a full close the server would not notice a client that resets the connection.
            transport.write_eof()
            await asyncio.wait({connection.lost}, timeout=_CLOSE_SECONDS)

    async def _accept_connections(self, listener: socket.socket) -> None:
        """Accept connections within the limits of files and connections."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                client_socket, _ = await loop.sock_accept(listener)
            except OSError as error:
                self._log.warning("%s: accepts no connections for a while: %s", self._section, error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            # The kernel gives the lowest free number, so all lower descriptors are in use.
            if client_socket.fileno() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES:
                client_socket.close()
                self._log.warning("%s: refuses connections: too few open files are left (ulimit -n)", self._section)
                continue
            client_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREAD_SECONDS)
            if (
                len(self._open_connections.strangers) + len(self._open_connections.admitted)
                >= self._max_connections + STRANGERS
            ):
                next(iter(self._open_connections.strangers)).abort()
            await loop.connect_accepted_socket(self._make_connection, client_socket)

    def _make_connection(self) -> _Connection:
        assert self._runner.server is not None, "the runner is set up before connections are accepted"
        return _Connection(self._runner.server(), self._open_connections)


@dataclass(slots=True)
class _OpenConnections:
    """The open connections of a server. `strangers`, oldest first, have not sent a request with a known key yet."""

    strangers: dict[_Connection, None]
    admitted: set[_Connection]


class _Connection(asyncio.Protocol):
    """Connection of a client, counted from its start to its end. `handler` is aiohttp's protocol.

    `on_unread` is called if the connection ends before the client has read the last answer. `lost` is done at the end.
    """

    def __init__(self, handler: asyncio.Protocol, connections: _OpenConnections) -> None:
        self._handler, self._connections = handler, connections
        self.on_unread: Callable[[], object] | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._abort_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.abort)
        self.data_received = handler.data_received
        self.pause_writing = handler.pause_writing
        self.resume_writing = handler.resume_writing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.strangers[self] = None
        self._handler.connection_made(transport)

    def eof_received(self) -> bool | None:
        if self._transport is not None and _has_unacknowledged_bytes(self._transport):
            self._report_unread()
        return self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        # The kernel resets a connection if its client closes it with unread bytes.
        if exc is not None:
            self._report_unread()
        self.lost.set_result(None)
        self._forget_connection()
        self._handler.connection_lost(exc)

    def admit(self) -> None:
        self._forget_connection()
        self._connections.admitted.add(self)

    def abort(self) -> None:
        self._forget_connection()
        if self._transport is not None:
            self._transport.abort()

    def _report_unread(self) -> None:
        if self.on_unread is not None:
            self.on_unread()
        self.on_unread = None

    def _forget_connection(self) -> None:
        self._abort_timer.cancel()
        self._connections.strangers.pop(self, None)
        self._connections.admitted.discard(self)


def _has_unacknowledged_bytes(transport: asyncio.WriteTransport) -> bool:
    num_in_kernel = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    # The end of a half-closed connection counts as one byte.
    return transport.get_write_buffer_size() + int.from_bytes(num_in_kernel, "little") > 1


class _BoundedLog(logging.Filter):
    """Log filter of a server: at most `_LOGGED_A_MINUTE` records a minute."""

    def __init__(self, section: str) -> None:
        super().__init__()
        self._section = section
        self._minute = -1
        self._num_logged = 0
        self._num_dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record. A malformed request's record is shortened to one line."""
        minute = int(time.monotonic() / 60)
        if minute != self._minute:
            self._minute = minute
            self._num_logged = 0
        # A client that sends garbage in a loop must not fill the disk.
        if self._num_logged >= _LOGGED_A_MINUTE:
            self._num_dropped += 1
            return False
        self._num_logged += 1
        text = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            reason = " ".join(str(error).split())
            text = f"{self._section}: malformed request: {type(error).__name__}: {reason:.200}"
            record.exc_info, record.exc_text = None, None
        dropped_text = f" ({self._num_dropped} more were not logged)" if self._num_dropped else ""
        self._num_dropped = 0
        record.msg, record.args = text + dropped_text, ()
        return True


def _make_server_log(section: str) -> logging.Logger:
    """Return a new logger with a limited number of warnings. Servers must not share its limit."""
    log = logging.Logger("megarl.serving.http_server", logging.WARNING)
    log.parent = logging.getLogger("megarl")
    log.addFilter(_BoundedLog(section))
    return log
