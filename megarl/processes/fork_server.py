"""The driver's side of fork servers. A fork server imports modules once, then forks one process per request.

Importing torch, Megatron-Core and vLLM takes most of a rank's start time on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO, Protocol

from megarl import faults
from megarl.files.import_path import import_object
from megarl.platform.native_stacks import is_stopped
from megarl.processes.fork_server_main import STATUS
from megarl.processes.launcher import DEVNULL, LaunchedProgram, python_call
from megarl.processes.process_tree import kill_tree, send_signal

SERVER_MAKER = "MEGARL_FORK_SERVER_MAKER"
"""Environment variable with the import path of a function or class to use instead of `ForkServerProcess`."""
PROCESS_VARIABLES = frozenset(
    {
        *("TMPDIR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST"),
        # torch stores there a folder of this process, but reads the variable only when it compiles.
        "TORCHINDUCTOR_CACHE_DIR",
        faults.VARIABLE,
    }
)
"""Variables set for each forked process. They may differ from the server's, because no import reads them."""

_MAX_SERVERS = 2
"""Maximum fork servers of this process. A further server replaces the least recently used one."""
_EXIT_CODE_SECONDS = 1.0
"""Seconds to wait for a fork server's exit code after its connections closed."""
_STOP_SECONDS = 10.0
"""Seconds for a fork server to kill its remaining processes and exit."""


class ServerHandle(Protocol):
    """Handle of a server's process. `requests` is the socket to it. `pid` is None if unknown."""

    requests: socket.socket
    pid: int | None

    def exit_code(self, seconds: float = ...) -> int | None:
        """Wait up to `seconds` for the end. Return the exit code (negative: a signal); None: the server still runs."""
        ...

    def kill(self) -> None: ...


class ForkServerProcess:
    """The process of a fork server: a child of this process. It ends with the thread that started it."""

    def __init__(
        self,
        environment: Mapping[str, str],
        path: Sequence[str],
        imports: Sequence[str],
        log: BinaryIO,
        *,
        executable: str = sys.executable,
        function: str = "megarl.processes.fork_server_main:serve",
    ) -> None:
        """`function` imports the modules `imports`, then serves. Output of the imports goes to `log`."""
        self.requests, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        tmpdir_variable = {"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}
        arguments = (str(server_socket.fileno()), str(os.getpid()), *imports)
        with server_socket:
            self._program = LaunchedProgram(
                python_call(function, *arguments, path=path, executable=executable),
                # With one thread, OpenMP and BLAS create no thread pool. A fork would not copy a pool's threads.
                environment={**import_variables(environment), **tmpdir_variable, "OMP_NUM_THREADS": "1"},
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                descriptors=[server_socket.fileno()],
            )
        self.pid: int | None = self._program.pid

    def exit_code(self, seconds: float = 0.0) -> int | None:
        return self._program.exit_code(seconds)

    def kill(self) -> None:
        self.requests.close()
        self._program.kill()


def import_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables fixed by the imports: all except `PROCESS_VARIABLES`."""
    return {name: value for name, value in environment.items() if name not in PROCESS_VARIABLES}


def _find_server_maker() -> Callable[[Mapping[str, str], Sequence[str], Sequence[str], BinaryIO], ServerHandle]:
    path = os.environ.get(SERVER_MAKER)
    return ForkServerProcess if path is None else import_object(path, SERVER_MAKER)


class ForkServer:
    """A process that has imported the modules `imports` under one environment, and forks others."""

    def __init__(self, environment: Mapping[str, str], imports: Sequence[str], log: BinaryIO | None) -> None:
        """Output of the imports goes to `log`; None: to the log of the first forked process."""
        # A rank's log is in the run's folder. The server may start before this folder exists.
        self._early_output = tempfile.TemporaryFile() if log is None else None  # noqa: SIM115
        self._first_log: BinaryIO | None = None
        output = log if self._early_output is None else self._early_output
        assert output is not None
        self._process = _find_server_maker()(environment, sys.path, imports, output)
        self._num_forked = 0
        self._is_closed = False
        self.is_ready = False
        """Whether the imports are complete. The first fork confirms this."""

    @property
    def is_running(self) -> bool:
        return self._process.exit_code() is None

    @property
    def stopped_process(self) -> int | None:
        pid = self._process.pid
        return pid if pid is not None and is_stopped(pid) else None

    @property
    def is_unused(self) -> bool:
        return self._num_forked == 0

    def exit_code(self) -> int:
        """Return the exit code of a server whose connections closed (negative: a signal)."""
        # A server that has not exited within the limit hangs. `kill` follows.
        code = self._process.exit_code(_EXIT_CODE_SECONDS)
        return -signal.SIGKILL if code is None else code

    def fork(self, name: str, function: str, environment: Mapping[str, str], log: BinaryIO) -> ForkedProcess:
        """Fork a process calling `function` (`package.module:name`) with a connected socket.

        Its output goes to `log`. `ps` and `top` show the first 15 characters of `name`. It takes only the variables in
        `PROCESS_VARIABLES` from `environment`, and all others from the server.
        """
        request = {
            "name": name,
            "function": function,
            "environment": {variable: environment[variable] for variable in PROCESS_VARIABLES & environment.keys()},
            "unset": sorted(PROCESS_VARIABLES - environment.keys()),
            "path": sys.path,
            "folder": os.getcwd(),
        }
        if self._early_output is not None and self._first_log is None:
            self._first_log = os.fdopen(os.dup(log.fileno()), "wb")
        connection, forked_socket = socket.socketpair()
        status, forked_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with forked_socket, forked_status:
            descriptors = [forked_socket.fileno(), forked_status.fileno(), log.fileno()]
            socket.send_fds(self._process.requests, [json.dumps(request).encode()], descriptors)
        self._num_forked += 1
        return ForkedProcess(self, connection, status)

    def write_early_output(self) -> None:
        """Write the output of imports before the first log to that log, once."""
        if self._early_output is None or self._first_log is None:
            return
        with self._early_output as early_output, self._first_log as log:
            early_output.seek(0)
            shutil.copyfileobj(early_output, log)
        self._early_output = self._first_log = None

    def kill(self) -> None:
        self._process.kill()

    def record_release(self) -> None:
        """Record the release of one forked process. A closed server ends when all its processes are released."""
        self._num_forked -= 1
        self._end_if_unused()

    def close(self) -> None:
        self._is_closed = True
        self._end_if_unused()

    def end(self) -> None:
        """Let the server kill the remaining members of its groups and exit. Kill the server if it takes too long."""
        # A server that is importing or stopped does not read its socket, so closing the socket would not end it.
        if self.is_ready and self.stopped_process is None:
            with suppress(OSError):
                self._process.requests.shutdown(socket.SHUT_WR)
            self._process.exit_code(_STOP_SECONDS)
        self.kill()

    def _end_if_unused(self) -> None:
        if self._is_closed and self.is_unused:
            self.end()


class ForkedProcess:
    """A process forked by a fork server. It leads a session. Its id is not reused before `release`."""

    def __init__(self, server: ForkServer, connection: socket.socket, status: socket.socket) -> None:
        self.connection = connection
        self.pid: int | None = None
        self.exit_code: int | None = None
        """Exit code: None while the process runs, negative if a signal killed it (-9: SIGKILL)."""
        self.ended_with_server = False
        """Whether the process died because its fork server did. Then `exit_code` is the server's."""
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Completes when the process ends, with the time of the end (`time.time()`)."""
        self._server = server
        self._status = status
        status.setblocking(False)
        asyncio.get_running_loop().add_reader(status, self._read_status)

    def _read_status(self) -> None:
        """Read from `status` the process's id after its fork, later its exit code."""
        try:
            message = self._status.recv(STATUS.size)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        # Either the imports are complete, or the server died.
        self._server.write_early_output()
        if message and self.pid is None:
            (self.pid,) = STATUS.unpack(message)
            self._server.is_ready = True
            return
        # An empty read means a dead server, and its forks die with it.
        self.ended_with_server = not message
        self.exit_code = STATUS.unpack(message)[0] if message else self._server.exit_code()
        asyncio.get_running_loop().remove_reader(self._status)
        self.ended.set_result(time.time())

    @property
    def stopped_server(self) -> int | None:
        """Process id of the fork server if it is stopped and has not yet forked this process."""
        return self._server.stopped_process if self.pid is None else None

    def signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to the process. Does nothing before its fork or after its end."""
        if self.pid is not None and self.exit_code is None:
            send_signal(self.pid, signal_number)

    def kill(self) -> None:
        """Kill the process, its descendants and the remaining members of its process group."""
        if self.pid is not None:
            # Kill from here, not through the server: the driver may exit next, and the server ends with it. While the
            # server runs, it reaps no process before `release`, so the id cannot belong to another process.
            if self._server.is_running:
                kill_tree(self.pid)
            return
        if self._server.is_ready:
            with suppress(OSError):
                self._status.shutdown(socket.SHUT_WR)
            return
        # A server that is still importing reads no sockets, so only a kill stops it now.
        self._server.kill()
        with suppress(OSError):
            # The server may not close its end of `status` before its imports end, so wake the reader here.
            self._status.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close both sockets. The server then kills the remaining process group and reaps the process."""
        asyncio.get_running_loop().remove_reader(self._status)
        self._status.close()
        self.connection.close()
        self._server.record_release()


_servers: dict[object, ForkServer] = {}


def fork_server(environment: Mapping[str, str], imports: Sequence[str], log: BinaryIO | None = None) -> ForkServer:
    """Return this thread's fork server for these modules and variables; start one if there is none.

    Restarted and further ranks reuse an existing server and import nothing again. `log` is that of `ForkServer`.
    """
    variables = sorted(import_variables(environment).items())
    # The key has the thread, because a server dies with the thread that started it (PR_SET_PDEATHSIG).
    key = (threading.get_native_id(), _find_server_maker(), tuple(variables), tuple(sys.path), tuple(imports))
    server = _servers.pop(key, None)
    if server is not None and server.stopped_process is not None:
        # Its processes continue, but it forks no further one.
        server.close()
        server = None
    if server is None or not server.is_running:
        server = ForkServer(environment, imports, log)
    _servers[key] = server
    while len(_servers) > _MAX_SERVERS:
        _servers.pop(next(iter(_servers))).close()
    return server


def end_fork_servers(*, is_all: bool = True) -> None:
    for key, server in list(_servers.items()):
        if is_all or server.is_unused:
            del _servers[key]
            server.end()
