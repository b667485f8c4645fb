"""Supervisor (`keeper`) of a killable process: its parent process, caps its log and ends it with the driver.

The supervisor is a separate process, so that it can adopt orphans: all descendants of the supervised process, even
after they left its process group. It kills all of them when the supervised process or the driver ends.
"""

from __future__ import annotations

import importlib
import io
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from megarl.processes.process_tree import ENDING_SIGNALS, adopt_orphans, die_with, kill_descendants

MAX_LOG_BYTES = 1 << 20
"""Limit of a process's log in bytes; further output is dropped."""

_PART_BYTES = 64 << 10
"""Bytes per read; the capacity of a pipe on Linux (pipe(7))."""


def keep(connection_descriptor: int, log_file: str | None, server: str) -> NoReturn:
    """Supervise a child process that calls `server` (`package.module:name`) with a socket. Never returns.

    `connection_descriptor` is the socket's file descriptor. Output goes to `log_file`, or nowhere if it is None. Exits
    with the child's exit code (128 + signal if killed), or with 0 when stdin is closed.
    """
    # Before the fork, so that no descendant can escape.
    adopt_orphans()
    os.set_inheritable(connection_descriptor, False)
    output, printed = os.pipe()
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(output)
        _be_server(keeper, socket.socket(fileno=connection_descriptor), printed, server)
    # Without these the driver would not see the child's end, and the pipe would never report its end.
    os.close(connection_descriptor)
    os.close(printed)
    log = _CappedLog(log_file)
    exit_code = _watch(child, output, log)
    # First kill all writers of the pipe; then the loop ends after the last output.
    kill_descendants()
    while log.copy(output):
        pass
    os._exit(exit_code)


def _be_server(keeper: int, connection: socket.socket, printed: int, server: str) -> NoReturn:
    try:
        os.setsid()
        die_with(keeper)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.close(nothing)
        os.close(printed)
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(line_buffering=True)
        _ignore_ending_signals()
        # Imported only in the child, so that the supervisor does not run the server's imports.
        module, _, name = server.partition(":")
        getattr(importlib.import_module(module), name)(connection)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _ignore_ending_signals() -> None:
    """Ignore signals sent to the whole job. Child processes of this process get their default handlers back."""
    # A Python handler, not SIG_IGN: exec resets handlers to the default, but keeps ignored signals ignored.
    for number in ENDING_SIGNALS:
        signal.signal(number, lambda *_: None)

    def restore() -> None:
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        release()

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)

    def hold() -> None:
        """Block the signals across a fork, so that none reaches the child before `restore`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=restore)


def _watch(child: int, output: int, log: _CappedLog) -> int:
    """Copy output and reap orphans until the child ends or stdin is closed. Return the child's exit code, or 0."""
    # SIGCHLD writes to this pipe, so that one poll() waits for output, for stdin and for the child's end.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in (*ENDING_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    poll = select.poll()
    for descriptor in (0, woken, output):
        poll.register(descriptor, select.POLLIN)
    while True:
        # Also before the first poll(): the child may have ended before the SIGCHLD handler was installed.
        exit_code = _reap(child)
        if exit_code is not None:
            return exit_code
        ready = {descriptor for descriptor, _ in poll.poll()}
        if woken in ready:
            os.read(woken, 512)
        if output in ready and not log.copy(output):
            poll.unregister(output)
        if 0 in ready:
            return 0


def _reap(child: int) -> int | None:
    """Reap all ended children. Return the exit code of `child` (128 + signal if killed), or None if it still runs."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


class _CappedLog:
    """A log file, created with its first byte and limited to `MAX_LOG_BYTES`."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file: int | None = None
        self._room = MAX_LOG_BYTES if path else 0

    def copy(self, output: int) -> bool:
        """Copy available output from a pipe. Return False if the pipe is closed."""
        part = os.read(output, _PART_BYTES)
        if part and self._room > 0:
            self._write(part)
        return bool(part)

    def _write(self, part: bytes) -> None:
        try:
            if self._file is None:
                self._open()
            if self._room <= 0:
                return
            assert self._file is not None
            _write_all(self._file, part[: self._room])
            self._room -= len(part)
            if self._room <= 0:
                _write_all(self._file, b"\n[more is not kept: this log has reached its size limit]\n")
        except OSError as error:
            # A full disk must not end the process: it goes on without a log.
            self._room = 0
            print(f"warning: {self._path}: cannot write the log ({error.strerror})", file=sys.stderr)

    def _open(self) -> None:
        assert self._path is not None
        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # A restarted process appends to the log of its predecessor; both together stay below the limit.
        self._room -= os.fstat(self._file).st_size


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
