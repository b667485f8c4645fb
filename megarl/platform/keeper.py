"""The keeper of a killable process: its parent, which limits its output and ends it with the driver.

It is a process of its own, so that it can adopt all processes that the other starts, also those that leave their
process group, and kill them when that or the driver ends.
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

from megarl.platform.processes import ENDING_SIGNALS, adopt_orphans, die_with, kill_descendants

MAX_LOG_BYTES = 1 << 20
"""Limit of a process's log; further output is dropped."""

_PART_BYTES = 64 << 10


def keep(connection_descriptor: int, log_file: str | None, server: str) -> NoReturn:
    """Start a process that runs `server` (`package.module:name`) on that connection.

    Ends when it ends, with its exit code, or when stdin is closed.
    """
    adopt_orphans()
    os.set_inheritable(connection_descriptor, False)
    output, printed = os.pipe()
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(output)
        _be_server(keeper, socket.socket(fileno=connection_descriptor), printed, server)
    os.close(connection_descriptor)
    os.close(printed)
    log = _CappedLog(log_file)
    exit_code = _watch(child, output, log)
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
        # Only here: the imports of the server must not become the keeper's.
        module, _, name = server.partition(":")
        getattr(importlib.import_module(module), name)(connection)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _ignore_ending_signals() -> None:
    """Ignore signals to the whole job; processes that it forks or starts handle them by default."""
    for number in ENDING_SIGNALS:
        signal.signal(number, lambda *_: None)

    def restore() -> None:
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        release()

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)

    def hold() -> None:
        """Block the signals until the child is ready to handle them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=restore)


def _watch(child: int, output: int, log: _CappedLog) -> int:
    """Copy output and reap orphans until the child ends or stdin is closed. Returns the child's exit code, or 0."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in (*ENDING_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    poll = select.poll()
    for descriptor in (0, woken, output):
        poll.register(descriptor, select.POLLIN)
    while True:
        # Before the first wait too: the child may have ended before its signal was listened to.
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
    """Reap all that ended. Returns the exit code of `child` (128 + signal), if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


class _CappedLog:
    """A log file that is created with its first byte and limited to `MAX_LOG_BYTES`."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file: int | None = None
        self._room = MAX_LOG_BYTES if path else 0

    def copy(self, output: int) -> bool:
        """Copy available output from a pipe; False if the pipe is closed."""
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
            self._room = 0
            print(f"warning: {self._path}: cannot keep what is printed ({error.strerror})", file=sys.stderr)

    def _open(self) -> None:
        assert self._path is not None
        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._room -= os.fstat(self._file).st_size


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
