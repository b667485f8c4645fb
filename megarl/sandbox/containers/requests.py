"""Request loop of a container: executes the host's requests within limits, and ends the container with its lease.

The loop runs in the first process of the container's namespaces, or outside, where it can see and kill the programs.
"""

from __future__ import annotations

import base64
import os
import resource
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megarl.files.pid_space import stat_fields
from megarl.processes.frames import FrameError, receive, send, time_limit
from megarl.processes.process_tree import fork_child
from megarl.processes.supervisor import OutputTail, become_program, reap

# Files of a task, in base64.
MAX_MESSAGE_BYTES = 256 << 20
_MESSAGE_SECONDS = 60.0
"""Seconds for a message to arrive completely after its first byte."""
_TICK_SECONDS = 0.1
"""Seconds between two checks of a running program's processes and memory."""
_PART_BYTES = 64 << 10
_SPARE_TASKS = 64
"""Tasks that the kernel allows beyond the limit, so that a check can notice the excess."""


DEFAULT_DISK_BYTES = 4 << 30
"""Maximum bytes of new files held in memory if the recipe sets no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one container. None: no limit."""

    processes: int | None = None
    """Maximum processes and threads at once."""
    memory_bytes: int | None = None
    """Maximum memory of all processes together, without cached files."""
    disk_bytes: int | None = None
    """Maximum bytes of new files."""
    output_bytes: int | None = None
    """Maximum bytes printed by one program."""
    cpus: float | None = None
    """CPUs used at once. Namespaces have no quota, so their programs are bound to this number of CPUs, rounded up."""


class Runtime(Protocol):
    """Starts and kills a container's programs: on this machine, in namespaces, or in podman, docker or apptainer."""

    has_own_users: bool
    """Whether the kernel counts the container's processes separately, because it has a user namespace."""

    def command(self, request: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str | None]:
        """Return command, environment and folder of the process that runs the requested program."""
        ...

    def process_ids(self) -> list[int]:
        """Return the ids of the container's processes. Empty: they cannot be seen from here."""
        ...

    def free_disk_bytes(self) -> int | None:
        """Return the bytes left for new files; None: unknown."""
        ...

    def kill_all(self) -> None: ...

    def put(self, folder: str, files: Mapping[str, tuple[int, bytes]]) -> None:
        """Replace `folder` by `files`: relative path to (mode, content). Raises OSError."""
        ...

    def get(self, path: str, max_bytes: int) -> bytes:
        """Return the content of a regular file. Raises OSError if it is missing or has more than `max_bytes`."""
        ...


class LeaseEndedError(Exception):
    """Raised when the host has not renewed the container's lease in time, or has ended."""


class RequestLoop:
    """Executes a host's requests, one at a time, as long as the host renews the lease.

    With a `listener` the loop outlives the host. A later host connects there, and joins the running program.
    """

    def __init__(
        self,
        connection: socket.socket,
        runtime: Runtime,
        limits: Limits,
        lease_seconds: float,
        *,
        facts: Mapping[str, Any],
        listener: socket.socket | None = None,
    ) -> None:
        """Create the loop. The first message to each host process contains `facts`."""
        self._connection: socket.socket | None = connection
        self._runtime, self._limits, self._facts, self._listener = runtime, limits, facts, listener
        self._lease_seconds = lease_seconds
        self._lease_end_time = time.monotonic() + lease_seconds
        self._label, self._program_start_time, self._answered_id = "", 0.0, 0
        """Label, start time and request number of the running program."""
        self._results: dict[str, dict[str, Any]] = {}
        """Results of ended programs by label, for a later host if the earlier one ended first."""
        self._deferred_request: dict[str, Any] | None = None
        """Request to execute after the running program has ended."""

    def run(self) -> None:
        """Execute requests until the host closes the connection or the lease ends."""
        try:
            self._send_greeting()
            while True:
                request, self._deferred_request = self._deferred_request, None
                request = request or self._receive_request(None)
                # A program may end before the host's request to cancel it arrives.
                if request is not None and request["do"] != "cancel":
                    self._execute_and_answer(request)
        except LeaseEndedError:
            return
        finally:
            # Do this whatever ends the loop, even an error of this module.
            self._runtime.kill_all()

    def _execute_and_answer(self, request: Mapping[str, Any]) -> None:
        """Carry out a request, and send its answer. An OSError becomes the answer's `error`."""
        self._answered_id = request["id"]
        try:
            match request["do"]:
                case "exec":
                    self._results[request["label"]] = answer = self._execute_program(request)
                case "join" if request["label"] in self._results:
                    answer = self._results[request["label"]]
                case "join":
                    # The earlier host ended before it started the program.
                    answer = {"error": "the container has no such program", "kind": "ContainerLost"}
                case "put":
                    self._runtime.put(request["folder"], _decoded_files(request["files"]))
                    answer = {}
                case "get":
                    content = self._runtime.get(request["path"], request["max_bytes"])
                    answer = {"content": base64.b64encode(content).decode()}
                case other:
                    answer = {"error": f"unknown request {other!r}"}
        except OSError as error:
            answer = {"error": error.strerror or str(error)}
        self._send({"id": self._answered_id, **answer})

    def _send_greeting(self) -> None:
        # An earlier program has ended, so it no longer has a time limit.
        seconds = time.monotonic() - self._program_start_time if self._label else 0.0
        self._send({"ready": True, **self._facts, "running": self._label, "seconds": seconds})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            if self._connection is not None:
                send(self._connection, message)
        except OSError:
            self._disconnect_host()

    def _disconnect_host(self) -> None:
        """Close the connection to the host. Raises LeaseEndedError if no later host can connect."""
        if self._listener is None:
            raise LeaseEndedError
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _receive_request(self, seconds: float | None) -> dict[str, Any] | None:
        """Wait for one message, at most `seconds` or until the lease ends. Return it if it is a request to execute.

        Raises LeaseEndedError.
        """
        seconds_left = self._lease_end_time - time.monotonic()
        wait_seconds = seconds_left if seconds is None else min(seconds_left, seconds)
        source = self._connection or self._listener
        assert source is not None, "without a host and a listener the lease has ended"
        if select.select([source], [], [], max(wait_seconds, 0.0))[0]:
            try:
                if self._connection is None:
                    self._accept_host(source)
                    return None
                request = receive(self._connection, MAX_MESSAGE_BYTES, time_limit(_MESSAGE_SECONDS))
            except (EOFError, OSError, FrameError):
                # After a broken frame the start of the next one is unknown: close this connection.
                self._disconnect_host()
                return None
            match request["do"]:
                case "stop":
                    raise LeaseEndedError
                case "renew":
                    self._lease_end_time = time.monotonic() + self._lease_seconds
                case _:
                    return request
        if time.monotonic() >= self._lease_end_time:
            raise LeaseEndedError
        return None

    def _accept_host(self, listener: socket.socket) -> None:
        # This does not renew the lease: a host that looks for ended containers also connects.
        self._connection, _ = listener.accept()
        self._connection.set_inheritable(False)
        self._send_greeting()

    def _execute_program(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run a program to its end or a limit, kill all processes of the container, and return the program's output."""
        command, environment, folder = self._runtime.command(request)
        # Without a user namespace, the kernel would also count the user's other processes, for example the training's.
        max_tasks = self._limits.processes if self._runtime.has_own_users else None
        program = _Program(command, environment, folder, base64.b64decode(request["stdin"]), max_tasks)
        self._label, self._program_start_time = request["label"], time.monotonic()
        try:
            outcome = self._watch_program(program)
        finally:
            self._label = ""
            # First kill all writers of the pipes: a background child would keep them open.
            self._runtime.kill_all()
        program.drain_output()
        printed_texts = {
            name: tail.text() for name, tail in zip(("stdout", "stderr"), program.tails.values(), strict=True)
        }
        return {"exit_code": program.exit_code, "outcome": outcome, "refused": program.start_error, **printed_texts}

    def _watch_program(self, program: _Program) -> str:
        """Wait for a program's end. Returns the exceeded limit, as `KIND: text`; empty: none."""
        while not program.wait_for_end(_TICK_SECONDS):
            request = self._receive_request(0.0)
            if request is not None and request["do"] == "join" and request["label"] == self._label:
                self._answered_id = request["id"]
            elif request is not None:
                # A later host continues after the end of an earlier program.
                self._deferred_request = None if request["do"] == "cancel" else request
                return "Cancelled: the host ended the program"
            if excess := self._describe_exceeded_limit(program):
                return excess
        # A program that cannot fork may end between two checks. Its children in the background still count.
        return self._describe_exceeded_limit(program)

    def _describe_exceeded_limit(self, program: _Program) -> str:
        """Return the limit that a program exceeds; empty: none."""
        limits = self._limits
        if limits.output_bytes is not None and program.num_printed_bytes > limits.output_bytes:
            return f"OutputLimit: the program printed more than {limits.output_bytes} bytes"
        # A process may end between the two reads.
        process_ids = self._runtime.process_ids()
        stats = [fields for pid in process_ids if (fields := stat_fields(pid))]
        # Field 20 of proc(5), stat: the number of threads. `fields` start with field 3.
        num_tasks = sum(int(fields[17]) for fields in stats)
        if limits.processes is not None and num_tasks > limits.processes:
            return f"ProcessLimit: the program has {num_tasks} processes and threads; {limits.processes} are allowed"
        if (
            limits.memory_bytes is not None
            and (used_bytes := _memory_bytes(process_ids, limits.memory_bytes)) > limits.memory_bytes
        ):
            return f"MemoryLimit: the program uses {used_bytes >> 20} MiB; {limits.memory_bytes >> 20} are allowed"
        # The size of the mounted tmpfs enforces this limit. Here a full one is only reported.
        if limits.disk_bytes is not None and self._runtime.free_disk_bytes() == 0:
            return f"DiskLimit: the program's files fill {limits.disk_bytes >> 20} MiB"
        return ""


class _Program:
    """A running program and its output."""

    def __init__(
        self, command: list[str], environment: dict[str, str], folder: str | None, stdin: bytes, max_tasks: int | None
    ) -> None:
        """Start a program in a child process. Pipes carry its outputs, and the reason if it cannot start."""
        self.exit_code: int | None = None
        self.start_error = ""
        self.num_printed_bytes = 0
        self.tails: dict[int, OutputTail] = {}
        self._closed_outputs: set[int] = set()
        """Outputs that the program has closed, by descriptor."""
        output_ends: list[int] = []
        for _ in range(2):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            self.tails[read_end] = OutputTail()
            output_ends.append(write_end)
        self._error_read_end, error_write_end = os.pipe2(os.O_CLOEXEC)
        # A file, not a pipe: reading it never waits, and no thread must write it meanwhile.
        stdin_file = os.memfd_create("stdin", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(stdin_file), "wb") as file:
            file.write(stdin)
        os.lseek(stdin_file, 0, os.SEEK_SET)

        def run_in_child() -> None:
            os.dup2(stdin_file, 0)
            # execvp searches the PATH of this process.
            os.environ.clear()
            os.environ.update(environment)
            try:
                if folder is not None:
                    os.chdir(folder)
                _limit_process(max_tasks)
            except OSError as error:
                os.write(error_write_end, (error.strerror or str(error)).encode())
                os._exit(127)
            become_program(command, output_ends[0], output_ends[1], error_write_end)

        self._child = fork_child(run_in_child)
        for descriptor in (*output_ends, error_write_end, stdin_file):
            os.close(descriptor)
        self._pidfd = os.pidfd_open(self._child)

    def wait_for_end(self, seconds: float) -> bool:
        """Read the output for up to `seconds`. Returns whether the program's first process has ended."""
        # Only the first process matters: children in the background are killed later.
        outputs = self.tails.keys() - self._closed_outputs
        for descriptor in select.select([self._pidfd, *outputs], [], [], seconds)[0]:
            if descriptor != self._pidfd and not self._read_output(descriptor):
                self._closed_outputs.add(descriptor)
        self.exit_code = reap(self._child)
        return self.exit_code is not None

    def drain_output(self) -> None:
        """Read the remaining output, after all writers have ended."""
        for descriptor in self.tails:
            # A process outside of the container may have the other end open.
            os.set_blocking(descriptor, False)
            with suppress(BlockingIOError):
                while self._read_output(descriptor):
                    pass
            os.close(descriptor)
        self.start_error = os.read(self._error_read_end, 1000).decode()
        os.close(self._error_read_end)
        os.close(self._pidfd)

    def _read_output(self, descriptor: int) -> bool:
        part = os.read(descriptor, _PART_BYTES)
        self.num_printed_bytes += len(part)
        self.tails[descriptor].add(part)
        return bool(part)


def _limit_process(max_tasks: int | None) -> None:
    # A core file of a large program would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if max_tasks is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (max_tasks + _SPARE_TASKS, max_tasks + _SPARE_TASKS))


def _memory_bytes(process_ids: list[int], limit_bytes: int) -> int:
    """Return processes' anonymous memory in bytes: exact if above the limit, else an upper estimate."""
    anonymous_pages = 0
    for pid in process_ids:
        try:
            _, resident_pages, shared_pages, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        except OSError:
            continue
        anonymous_pages += int(resident_pages) - int(shared_pages)
    # Do not count pages shared with files: the kernel can drop them at any time.
    anonymous_bytes = anonymous_pages * resource.getpagesize()
    return anonymous_bytes if anonymous_bytes <= limit_bytes else sum(map(_proportional_bytes, process_ids))


def _proportional_bytes(pid: int) -> int:
    """Return a process's anonymous memory in bytes. A page shared after a fork counts in part."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def _decoded_files(files: Mapping[str, Any]) -> dict[str, tuple[int, bytes]]:
    return {path: (mode, base64.b64decode(content)) for path, (mode, content) in files.items()}
