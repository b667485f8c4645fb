"""A supervised child process. It is killed with all its descendants, soon after this process ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megarl.files.shipped import PACKAGE
from megarl.processes.launcher import DEVNULL, LaunchedProgram

_OWN_END_SECONDS = 2.0
"""Seconds for a process to exit by itself after it closed its connection, so its exit code is known."""
_END_SECONDS = 10.0
"""Seconds for the supervisor to kill its processes and to report."""
_PART_BYTES = 1 << 20
_SUPERVISOR = """
import json, sys
sys.path.append(sys.argv[1])
from megarl.processes.supervisor import supervise
supervise(json.loads(sys.argv[2]))
"""
_ROOT = str(PACKAGE.parent)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended, with the last 64 KiB of stdout and of stderr unless a log has them."""

    exit_code: int | None
    """Exit code; 128 plus the signal's number if a signal killed the process; None: this process killed it."""
    stdout: str = ""
    stderr: str = ""
    refused: str = ""
    """Why the program could not be started; empty: it was started."""

    def __str__(self) -> str:
        if self.refused:
            return f"cannot be started: {self.refused}"
        if self.exit_code is None:
            return "was killed"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(self.exit_code - 128).name}"
        return f"ended with exit code {self.exit_code}"

    def stderr_tail(self, most_characters: int = 400) -> str:
        return " ".join(self.stderr.split())[-most_characters:]


class SupervisedProcess:
    """A program whose parent is a supervisor process. The supervisor kills the program when this process ends. With
    `end_seconds` the program first gets this time to end by itself.

    `stdin` is the program's standard input. Its output goes to `log_file`, at most 1 MiB. Without a log, `Ended` has
    the last 64 KiB of each output. With `has_connection` the program gets one end of a socket, `connection` is the
    other end. The descriptor's number is appended to `command`. Raises OSError if the machine cannot start a process.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        log_file: str | None = None,
        has_connection: bool = False,
        end_seconds: float = 0.0,
    ) -> None:
        # One socket pair controls the supervisor and brings its report, a second one connects to the program.
        self._control, supervisor_control = socket.socketpair()
        self._control_poll = select.poll()
        self._control_poll.register(self._control, select.POLLIN)
        self._report = b""
        self._ended: Ended | None = None
        self._connection, program_connection = socket.socketpair() if has_connection else (None, None)
        inherited_descriptors = [
            socket_end.fileno() for socket_end in (supervisor_control, program_connection) if socket_end is not None
        ]
        # The program's command ends with the number of its connection, if it has one.
        settings = {
            "command": [*command, *map(str, inherited_descriptors[1:])],
            "control": inherited_descriptors[0],
            "connection": inherited_descriptors[1] if has_connection else None,
            "log_file": log_file,
            "end_seconds": end_seconds,
        }
        try:
            with _memory_file(stdin) as input_file:
                self._supervisor = LaunchedProgram(
                    # -I -S -B: no user's paths, no packages and no bytecode files, which makes the start quick.
                    [sys.executable, "-I", "-S", "-B", "-c", _SUPERVISOR, _ROOT, json.dumps(settings)],
                    folder=folder,
                    environment=environment,
                    stdin=input_file,
                    stdout=DEVNULL,
                    descriptors=inherited_descriptors,
                )
        except BaseException:
            self._close_sockets()
            raise
        finally:
            for socket_end in (supervisor_control, program_connection):
                if socket_end is not None:
                    socket_end.close()

    @property
    def pid(self) -> int:
        """Process id of the supervisor, an ancestor of the program and of all its descendants."""
        return self._supervisor.pid

    @property
    def connection(self) -> socket.socket:
        """This process's end of the socket. Only with `has_connection`."""
        assert self._connection is not None
        return self._connection

    @property
    def has_ended(self) -> bool:
        return self._ended is not None or bool(self._control_poll.poll(0))

    def end(self) -> Ended:
        """Wait 2 s for the exit of a program that closed its connection, then kill it. Return how it ended."""
        if self._ended is None:
            self._receive_report(_OWN_END_SECONDS)
        return self.kill()

    def kill(self) -> Ended:
        """Let the supervisor kill all processes and exit. Return how the program ended."""
        if self._ended is None:
            self._ask_supervisor_to_kill()
            if not self._receive_report(_END_SECONDS):
                self._supervisor.kill()
        return self._record_end()

    async def wait_for_end(self) -> Ended:
        """Wait until the program and its descendants have ended. Return how the program ended."""
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        while self._ended is None and (part := await loop.sock_recv(self._control, _PART_BYTES)):
            self._report += part
        return self._record_end()

    async def stop(self) -> Ended:
        """Kill all processes without blocking the event loop. Return how the program ended."""
        if self._ended is None:
            self._ask_supervisor_to_kill()
            try:
                async with asyncio.timeout(_END_SECONDS):
                    return await self.wait_for_end()
            except TimeoutError:
                self._supervisor.kill()
        return self._record_end()

    def _ask_supervisor_to_kill(self) -> None:
        # The end of file on this socket asks the supervisor to kill all.
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def _receive_report(self, seconds: float) -> bool:
        """Receive the supervisor's report. Return False if it does not arrive in time."""
        deadline = time.monotonic() + seconds
        try:
            while True:
                self._control.settimeout(max(deadline - time.monotonic(), 0.001))
                part = self._control.recv(_PART_BYTES)
                if not part:
                    return True
                self._report += part
        except TimeoutError:
            return False

    def _record_end(self) -> Ended:
        if self._ended is None:
            self._ended = self._read_report(self._supervisor.wait())
            self._close_sockets()
        return self._ended

    def _read_report(self, supervisor_code: int) -> Ended:
        """Return how the program ended. A negative `supervisor_code` is a signal."""
        # A killed supervisor reports nothing. Its child died with it.
        if supervisor_code < 0:
            return Ended(128 - supervisor_code)
        # A supervisor exits with 0 after its report. So this one failed before or while it watched the program.
        if supervisor_code > 0:
            return Ended(None, refused=f"its supervisor ended with {supervisor_code}")
        try:
            return Ended(**json.loads(self._report))
        # The report did not arrive completely.
        except (TypeError, ValueError):
            return Ended(None)

    def _close_sockets(self) -> None:
        self._control.close()
        if self._connection is not None:
            with suppress(OSError):
                # shutdown() wakes a thread waiting for an answer; close() alone does not.
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()


def _memory_file(content: bytes) -> io.BufferedRandom:
    file = open(os.memfd_create("stdin"), "r+b")  # noqa: SIM115 - the caller closes it
    file.write(content)
    file.seek(0)
    return file
