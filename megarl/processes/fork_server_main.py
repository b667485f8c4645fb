"""The fork server's own process: imports modules once, then forks one process per request.

It has a single thread, so a fork never copies a lock held by another thread.
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

from megarl.files.private_folder import PrivateFolder
from megarl.platform.imports import disable_collector
from megarl.processes.process_tree import ENDING_SIGNALS, die_with, fork, kill_tree

STATUS = struct.Struct("<i")
"""Status message: first the process id after the fork, later the exit code (negative: a signal)."""
MAX_REQUEST_BYTES = 1 << 16
"""Maximum bytes of a request. It is one packet, read by one call."""
_NUM_DESCRIPTORS = 3
"""File descriptors sent with a request: connection, status socket, log."""


@dataclass(slots=True)
class _Forked:
    """A forked process, not yet reaped. Its id is not reused before the driver closes its end of `status`."""

    pid: int
    status: socket.socket
    is_reported: bool = False
    is_released: bool = False

    def report_end(self) -> None:
        # WNOWAIT leaves the process a zombie, so that its id stays reserved.
        end_info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end_info is not None and not self.is_reported:
            self.is_reported = True
            code = end_info.si_status if end_info.si_code == os.CLD_EXITED else -end_info.si_status
            with suppress(OSError):
                self.status.send(STATUS.pack(code))

    def release(self) -> None:
        """Kill the remaining members of the process's group. Call it after the driver closed its end of `status`."""
        self.is_released = True
        kill_tree(self.pid)


@dataclass(frozen=True, slots=True)
class _Request:
    """Request for a forked process: its JSON content, and the descriptors of its connection and its log."""

    content: bytes
    connection: int
    log: int

    def begin(self) -> Callable[[socket.socket], object]:
        """Reset this process to the state of a new interpreter. Return the function to call next."""
        for signal_number in (*ENDING_SIGNALS, signal.SIGCHLD):
            signal.signal(signal_number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _redirect_output(self.log)
        request = json.loads(self.content)
        Path("/proc/self/comm").write_text(request["name"])
        os.chdir(request["folder"])
        sys.path[:] = request["path"]
        for name in request["unset"]:
            os.environ.pop(name, None)
        os.environ.update(request["environment"])
        # Forget the server's temporary folder, so that Python reads TMPDIR again.
        tempfile.tempdir = None
        _set_num_threads()
        module, _, function = request["function"].partition(":")
        return getattr(importlib.import_module(module), function)


@dataclass(slots=True)
class _Server:
    requests: socket.socket
    forked: dict[int, _Forked] = field(default_factory=dict)

    def run(self) -> _Request | None:
        """Serve until the driver closes its socket, then kill all remaining processes.

        Returns the request in each forked process, and None in the server.
        """
        # SIGCHLD writes to this pair of sockets, so that one wait covers requests and ended processes.
        wake_receiver, wake_sender = socket.socketpair()
        for wake_end in (wake_receiver, wake_sender):
            wake_end.setblocking(False)
        for signal_number in (*ENDING_SIGNALS, signal.SIGCHLD):
            signal.signal(signal_number, lambda *_: None)
        signal.set_wakeup_fd(wake_sender.fileno(), warn_on_full_buffer=False)
        selector = selectors.PollSelector()
        selector.register(self.requests, selectors.EVENT_READ)
        selector.register(wake_receiver, selectors.EVENT_READ)
        while self.forked or self.requests in selector.get_map():
            for key, _ in selector.select():
                if key.fileobj is self.requests:
                    result = self._fork()
                    if isinstance(result, _Request):
                        self._close_inherited(wake_receiver, wake_sender)
                        return result
                    if result is None:
                        self._stop(selector)
                        break
                    selector.register(result.status, selectors.EVENT_READ, result)
                elif key.fileobj is wake_receiver:
                    wake_receiver.recv(4096)
                else:
                    key.data.release()
                    selector.unregister(key.fileobj)
            self._reap()
        return None

    def _fork(self) -> _Forked | _Request | None:
        """Fork a process for the next request. Return the request in the forked process; None: the driver closed its
        socket.
        """
        content, descriptors, _, _ = socket.recv_fds(self.requests, MAX_REQUEST_BYTES, _NUM_DESCRIPTORS)
        if not content:
            return None
        connection, status, log = descriptors
        # A session of its own, so that the driver can kill the whole process group.
        pid = fork()
        if pid == 0:
            os.close(status)
            return _Request(content, connection, log)
        os.close(connection)
        os.close(log)
        forked = self.forked[pid] = _Forked(pid, socket.socket(fileno=status))
        with suppress(OSError):
            forked.status.send(STATUS.pack(pid))
        return forked

    def _close_inherited(self, *wake_sockets: socket.socket) -> None:
        """Close the server's sockets in a forked process.

        With an open copy, the driver would not see the server's end.
        """
        signal.set_wakeup_fd(-1)
        for inherited in (self.requests, *wake_sockets, *(process.status for process in self.forked.values())):
            inherited.close()

    def _stop(self, selector: selectors.BaseSelector) -> None:
        selector.unregister(self.requests)
        for forked in self.forked.values():
            if not forked.is_released:
                selector.unregister(forked.status)
                forked.release()

    def _reap(self) -> None:
        """Report ended processes to the driver, and reap them once the driver has released them."""
        for forked in list(self.forked.values()):
            forked.report_end()
            if forked.is_reported and forked.is_released:
                os.waitpid(forked.pid, 0)
                forked.status.close()
                del self.forked[forked.pid]


def _set_num_threads() -> None:
    """Set torch's threads to OMP_NUM_THREADS. torch has read this variable in the server, where it is 1."""
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _import_modules(modules: Sequence[str]) -> None:
    """Import the modules. Remove their temporary files and variables, because forked processes must not share them."""
    folder = PrivateFolder()
    tmpdir_before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder.path)
    tempfile.tempdir = None
    try:
        with disable_collector():
            for module in modules:
                importlib.import_module(module)
    finally:
        for name, value in list(os.environ.items()):
            if str(folder.path) in value:
                del os.environ[name]
        if tmpdir_before is not None:
            os.environ["TMPDIR"] = tmpdir_before
        folder.remove()


def _redirect_output(descriptor: int) -> None:
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def serve(descriptor: str, driver_pid: str, *modules: str) -> Callable[[], object]:
    """Import the modules, then serve requests until the driver ends. Return only in forked processes: their function.

    `descriptor` is the file descriptor of the request socket, `driver_pid` the process id of the driver.
    """
    begin(int(driver_pid), modules)
    return fork_on_request(socket.socket(fileno=int(descriptor)))


def begin(parent_pid: int, modules: Sequence[str]) -> None:
    """Import the modules, then discard all further output. This process dies with `parent_pid`."""
    die_with(parent_pid)
    try:
        _import_modules(modules)
    except Exception:
        # Start again without modules. Each forked process then raises the import error itself, and the error is
        # reported there. No process inherits a half-imported module.
        os.execv(sys.executable, sys.orig_argv[: -len(modules)])
    _redirect_output(os.open(os.devnull, os.O_WRONLY))


def fork_on_request(requests: socket.socket) -> Callable[[], object]:
    """Fork a process for each request on the socket. Returns only in forked processes: their function."""
    request = _Server(requests).run()
    if request is None:
        os._exit(0)
    return partial(request.begin(), socket.socket(fileno=request.connection))
