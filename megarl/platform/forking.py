"""The fork server's own process: imports modules once, then forks a process for each request.

It has one thread, so that a fork copies no lock that another one holds.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megarl.platform.imports import uncollected
from megarl.platform.private_folder import PrivateFolder
from megarl.platform.processes import ENDING_SIGNALS, die_with
from megarl.platform.server_process import credentials

STATUS = struct.Struct("<i")
"""A message about a process: its id when it has been forked, its exit code (or the negative signal) when it ended."""
MAX_REQUEST_BYTES = 1 << 16
_NUM_DESCRIPTORS = 3


@dataclass(slots=True)
class _Forked:
    """A process that was forked and not yet reaped: its id stays its own until the driver has closed its end."""

    pid: int
    status: socket.socket
    is_reported: bool = False
    is_released: bool = False

    def report(self) -> None:
        """Tell the driver how the process ended, if it has."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and not self.is_reported:
            self.is_reported = True
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with suppress(OSError):
                self.status.send(STATUS.pack(code))

    def release(self) -> None:
        """Kill what is left of the process and its group: the driver has closed its end."""
        self.is_released = True
        kill_group(self.pid)


@dataclass(frozen=True, slots=True)
class _Request:
    """The task of a forked process, and the server that forked it."""

    server: int
    content: bytes
    connection: int
    log: int

    def begin(self) -> Callable[[socket.socket], object]:
        """Make this process what a new interpreter would be; the function that it is to run."""
        os.setsid()
        die_with(self.server)
        for number in (*ENDING_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _print_to(self.log)
        request = json.loads(self.content)
        Path("/proc/self/comm").write_text(request["name"])
        os.chdir(request["folder"])
        sys.path[:] = request["path"]
        for name in request["unset"]:
            os.environ.pop(name, None)
        os.environ.update(request["environment"])
        tempfile.tempdir = None  # not the server's: TMPDIR is read again
        _set_num_threads()
        module, _, function = request["function"].partition(":")
        return getattr(importlib.import_module(module), function)


@dataclass(slots=True)
class _Server:
    requests: socket.socket
    driver: int | None = None
    """A descriptor by which the kernel tells the driver's end, where the server does not die with it."""
    forked: dict[int, _Forked] = field(default_factory=dict)

    def run(self) -> _Request | None:
        """Serve until the driver closes its end or ends; then kill what has not ended.

        Returns twice: in each forked process with what that is to run.
        """
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        for number in (*ENDING_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        selector = selectors.PollSelector()
        selector.register(self.requests, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        if self.driver is not None:
            selector.register(self.driver, selectors.EVENT_READ)
        while self.forked or self.requests in selector.get_map():
            for key, _ in selector.select():
                if key.fileobj is self.requests:
                    made = self._fork()
                    if isinstance(made, _Request):
                        signal.set_wakeup_fd(-1)
                        for own in (self.requests, woken, wake, *(forked.status for forked in self.forked.values())):
                            own.close()
                        if self.driver is not None:
                            os.close(self.driver)
                        return made
                    if made is None:
                        self._leave(selector)
                        break
                    selector.register(made.status, selectors.EVENT_READ, made)
                elif key.fileobj == self.driver:
                    self._leave(selector)
                    break
                elif key.fileobj is woken:
                    woken.recv(4096)
                else:
                    key.data.release()
                    selector.unregister(key.fileobj)
            self._reap()
        return None

    def _fork(self) -> _Forked | _Request | None:
        """Fork the process of the next request. Returns None where there is none any more, in it the request."""
        content, descriptors, _, _ = socket.recv_fds(self.requests, MAX_REQUEST_BYTES, _NUM_DESCRIPTORS)
        if not content:
            return None
        connection, status, log = descriptors
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(status)
            return _Request(server, content, connection, log)
        os.close(connection)
        os.close(log)
        forked = self.forked[pid] = _Forked(pid, socket.socket(fileno=status))
        with suppress(OSError):
            forked.status.send(STATUS.pack(pid))
        return forked

    def _leave(self, selector: selectors.BaseSelector) -> None:
        """Take no more requests, and kill all that runs."""
        selector.unregister(self.requests)
        if self.driver is not None:
            selector.unregister(self.driver)
        for forked in self.forked.values():
            if not forked.is_released:
                selector.unregister(forked.status)
                forked.release()

    def _reap(self) -> None:
        """Report the processes that ended, and reap those that the driver has released."""
        for forked in list(self.forked.values()):
            forked.report()
            if forked.is_reported and forked.is_released:
                os.waitpid(forked.pid, 0)
                forked.status.close()
                del self.forked[forked.pid]


def kill_group(pid: int) -> None:
    """Kill a forked process that is not reaped yet, and what is left of its group."""
    for kill in (os.killpg, os.kill):  # a process that has just been forked leads no group yet
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _set_num_threads() -> None:
    """Give torch the threads that OMP_NUM_THREADS names: it has read it, in the server."""
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _import(modules: Sequence[str]) -> None:
    """Import the modules. Temporary files that this makes, and variables that name them, are not for the forked."""
    folder = PrivateFolder()
    own = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder.path)
    tempfile.tempdir = None
    try:
        with uncollected():
            for module in modules:
                importlib.import_module(module)
    finally:
        for name, value in list(os.environ.items()):
            if str(folder.path) in value:
                del os.environ[name]
        if own is not None:
            os.environ["TMPDIR"] = own
        folder.remove()


def _print_to(descriptor: int) -> None:
    """Make it standard output and error, and close it."""
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def serve(number: str, driver: str, *modules: str) -> Callable[[], object]:
    """Import the modules, then fork. Returns in forked processes only, with what each is to run.

    `number` is the descriptor of the socket of requests, `driver` the process id of the driver.
    """
    _begin(int(driver), modules)
    return _asked_of(_Server(socket.socket(fileno=int(number))))


def lend(number: str, owner: str, *modules: str) -> Callable[[], object]:
    """As `serve` for many drivers: forks a server for each, on the connection that comes in on the socket.

    `owner` is the process id of who sends connections. Returns in forked processes of drivers only.
    """
    _begin(int(owner), modules)
    for ending in ENDING_SIGNALS:
        signal.signal(ending, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the servers
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
            Path("/proc/self/comm").write_text(f"megarl {driver}")  # whose it is
            return _asked_of(_Server(connection, _end_of(driver)))
        connection.close()
    with suppress(ChildProcessError):
        os.wait()  # for all of them
    os._exit(0)


def _begin(parent: int, modules: Sequence[str]) -> None:
    """End with the parent, import the modules, and print nothing from now on."""
    die_with(parent)
    try:
        _import(modules)
    except Exception:
        # Each forked process meets the error where it is reported, in an interpreter without half of an import.
        os.execv(sys.executable, sys.orig_argv[: -len(modules)])
    _print_to(os.open(os.devnull, os.O_WRONLY))


def _asked_of(server: _Server) -> Callable[[], object]:
    """Run a server. Returns in the processes that it forks, with what each is to run."""
    request = server.run()
    if request is None:
        os._exit(0)
    return partial(request.begin(), socket.socket(fileno=request.connection))


def _end_of(driver: int) -> int:
    """A descriptor that can be read once the process has ended."""
    try:
        return os.pidfd_open(driver)
    except ProcessLookupError:
        os._exit(0)
