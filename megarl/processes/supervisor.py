"""Supervisor: the parent process of a child process. It limits the child's log and kills it when the driver ends.

As a separate process it can adopt orphans: all descendants of the child, even outside its process group. All are killed
when the child or the driver ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

from megarl.processes.process_tree import ENDING_SIGNALS, adopt_orphans, fork_child, kill_descendants

MAX_LOG_BYTES = 1 << 20
"""Maximum bytes of a process's log. Further output is dropped."""
TAIL_BYTES = 1 << 16
"""Maximum bytes stored from the end of each output of a process without a log."""
_PART_BYTES = 64 << 10
"""Bytes per read: the capacity of a pipe on Linux (pipe(7))."""


def supervise(settings: Mapping[str, Any]) -> NoReturn:
    """Run the program `settings["command"]`, and report its end on the socket `control`. Never returns.

    When the driver closes `control`, all processes are killed. If the driver has ended, the program first gets
    `end_seconds` to end by itself. With `control` = None it outlives the driver.
    `connection` is a descriptor for the program, or None. With `log_file` all output goes there.

    The report is a JSON object. `exit_code` is 128 + signal if a signal killed the program, null if the driver ended
    it. `stdout` and `stderr` are the last output without a log. `refused` is the reason why the program cannot start.
    """
    # Before the fork, so that no descendant can escape.
    adopt_orphans()
    control = None if settings["control"] is None else socket.socket(fileno=settings["control"])
    if control is not None:
        control.set_inheritable(False)
    sinks, write_ends = _open_sinks(settings["log_file"])
    refusal_reader, refusal_writer = os.pipe()
    child = fork_child(lambda: become_program(settings["command"], write_ends[0], write_ends[-1], refusal_writer))
    # Close this process's copies. A pipe or socket reports its end only when no process has it open for writing.
    for descriptor in {*write_ends, refusal_writer, settings["connection"]} - {None}:
        os.close(descriptor)
    exit_code = _watch_child(child, control, sinks, settings["end_seconds"])
    # First kill all writers of the pipes; then the loop ends after the last output.
    kill_descendants()
    for read_end, sink in sinks.items():
        while part := os.read(read_end, _PART_BYTES):
            sink.add(part)
    # With a log, the report has no output.
    stdout, stderr = [sink.text() for sink in sinks.values() if isinstance(sink, OutputTail)] or ["", ""]
    report = {
        "exit_code": exit_code,
        "stdout": stdout,
        "stderr": stderr,
        "refused": os.read(refusal_reader, 1000).decode(),
    }
    # The driver may have ended.
    with suppress(OSError):
        if control is not None:
            control.sendall(json.dumps(report).encode())
    os._exit(0)


def _open_sinks(log_file: str | None) -> tuple[dict[int, _Sink], list[int]]:
    """Open a pipe for each sink of the program's output. Return the sinks by read end, and the write ends."""
    sinks: dict[int, _Sink] = {}
    write_ends: list[int] = []
    # One pipe for both outputs keeps the order of their lines in the log.
    for sink in [_CappedLog(log_file)] if log_file else [OutputTail(), OutputTail()]:
        read_end, write_end = os.pipe()
        sinks[read_end] = sink
        write_ends.append(write_end)
    return sinks, write_ends


def become_program(command: list[str], stdout: int, stderr: int, refusal_writer: int) -> None:
    """Replace this process by a program with the same standard input. A failure is written to `refusal_writer`."""
    # Python ignores these signals, and a program would inherit this: a writer would outlive the reader of its pipe.
    for signal_number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signal_number, signal.SIG_DFL)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(refusal_writer, str(error.strerror).encode())
        os._exit(127)


def _watch_child(
    child: int, control: socket.socket | None, sinks: Mapping[int, _Sink], end_seconds: float
) -> int | None:
    """Copy output and reap orphans until the child ends, the driver closes `control`, or `end_seconds` after its end.

    Returns the child's exit code; None if it still runs.
    """
    # SIGCHLD writes to this pipe, so that one poll() waits for output, for the driver and for the child's end.
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    for signal_number in (*ENDING_SIGNALS, signal.SIGCHLD):
        signal.signal(signal_number, lambda *_: None)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    poll = select.poll()
    control_descriptors = set() if control is None else {control.fileno()}
    for descriptor in (*control_descriptors, wake_reader, *sinks):
        poll.register(descriptor, select.POLLIN)
    end_deadline: float | None = None
    while True:
        # Also before the first poll(): the child may have ended before the SIGCHLD handler was installed.
        exit_code = reap(child)
        if exit_code is not None:
            return exit_code
        wait_milliseconds = None if end_deadline is None else max(0.0, end_deadline - time.monotonic()) * 1000
        events_by_descriptor = dict(poll.poll(wait_milliseconds))
        if wake_reader in events_by_descriptor:
            os.read(wake_reader, 512)
        for output in events_by_descriptor.keys() & sinks.keys():
            part = os.read(output, _PART_BYTES)
            sinks[output].add(part)
            if not part:
                poll.unregister(output)
        if (
            control is not None
            and events_by_descriptor.get(control.fileno(), 0) & select.POLLHUP
            and end_deadline is None
        ):
            # The driver has ended. Then it has also closed its connection to the program.
            poll.unregister(control)
            end_deadline = time.monotonic() + end_seconds
        elif control_descriptors & events_by_descriptor.keys() or (
            end_deadline is not None and time.monotonic() >= end_deadline
        ):
            # The child may have ended at the same moment.
            return reap(child)


def reap(child: int) -> int | None:
    """Reap all ended children. Return the exit code of `child` (128 + signal if killed); None: it still runs."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


class _Sink(Protocol):
    """Destination of a process's output."""

    def add(self, part: bytes) -> None: ...


class OutputTail:
    """The last bytes of a process's output."""

    def __init__(self) -> None:
        self._content = b""

    def add(self, part: bytes) -> None:
        self._content = (self._content + part)[-TAIL_BYTES:]

    def text(self) -> str:
        return self._content.decode(errors="replace")


class _CappedLog:
    """A log file of at most `MAX_LOG_BYTES`. Its first byte creates it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None
        self._free_bytes = MAX_LOG_BYTES

    def add(self, part: bytes) -> None:
        """Write a part of the output, up to the log's size limit."""
        if not part or self._free_bytes <= 0:
            return
        try:
            if self._file is None:
                self._open()
            # Opening subtracts what an earlier process wrote: nothing may be left.
            if self._free_bytes <= 0:
                return
            assert self._file is not None
            _write_all(self._file, part[: self._free_bytes])
            self._free_bytes -= len(part)
            if self._free_bytes <= 0:
                _write_all(self._file, b"\n[further output is dropped: this log has reached its size limit]\n")
        except OSError as error:
            # A full disk must not end the process: it continues without a log.
            self._free_bytes = 0
            print(f"warning: {self._path}: cannot write the log ({error.strerror})", file=sys.stderr)

    def _open(self) -> None:
        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # A restarted process appends to the log of its predecessor. Together they stay below the limit.
        self._free_bytes -= os.fstat(self._file).st_size


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
