"""Sandbox on this machine: runs a program with an input, and returns its output and exit code."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from megarl.files.shipped import PACKAGE
from megarl.platform.native_stacks import is_stopped
from megarl.processes.launcher import DEVNULL, PIPE, LaunchedProgram
from megarl.sandbox.busy_time import BusyTime
from megarl.sandbox.inside import READY
from megarl.sandbox.layers import LAYERS, Layers
from megarl.types import ConfigError

# Seconds for the spawner or a program to start, for a killed process to end, and minimum extension of a deadline.
_START_SECONDS = 60.0
_KILL_SECONDS = 10.0
_LEAST_EXTENSION_SECONDS = 0.05
_PART_BYTES = 64 << 10
_MAX_ERROR_BYTES = 16 << 10
"""Maximum bytes of standard error; further output is dropped."""
_MAX_MESSAGE_BYTES = 64 << 10
# Seals make a file in memory constant, so the program cannot change its source or input.
_SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_SPAWNER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from megarl.sandbox.spawner import main
main()
"""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # The order of a set must not differ between runs.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_TRIAL = "import colorsys, os\nprint(os.getuid(), sum(range(10)))"
"""Program that tests the sandbox. It imports a module that the spawner has not imported."""

Outcome = Literal["ok", "error", "timeout", "output"]


class SandboxError(Exception):
    """Raised if the sandbox itself fails, not the program in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Settings of a sandbox: the recipe's section `sandbox`."""

    require: tuple[str, ...] = LAYERS
    url: str | None = None
    timeout_seconds: float = 4.0
    wall_timeout_seconds: float | None = None
    total_timeout_seconds: float = 20.0
    memory_mib: int = 512
    output_kib: int = 64
    packages: tuple[str, ...] = ("numpy",)
    longest_seconds: float | None = None
    """Wall-clock limit in seconds of a run, idle or busy; None: three times `wall_seconds`."""

    @property
    def wall_seconds(self) -> float:
        """Wall-clock limit, in seconds, of a run's idle time. Computing or waiting for a CPU does not count."""
        return self.wall_timeout_seconds or max(10 * self.timeout_seconds, 30.0)


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a program's run.

    `outcome` is `ok` (exit code 0), `error` (another exit code, or 128 plus the signal's number), `timeout` (too long)
    or `output` (printed too much). Texts are decoded from UTF-8, with other bytes replaced.
    """

    outcome: Outcome
    stdout: str
    stderr: str
    exit_code: int
    _: KW_ONLY
    cpu_seconds: float
    wall_seconds: float
    retries: int = 0
    """Number of repeated requests to a sandbox server."""
    is_wall_clock_timeout: bool = False
    """Whether wall-clock time, not CPU time, caused a `timeout`."""


class Sandbox:
    """Runs programs one after the other, each in a separate process, started by a spawner process.

    Any thread may use it. Close it at the end. `_without`: layers of isolation to switch off, to test the others.
    """

    def __init__(self, settings: SandboxSettings, *, _without: Sequence[str] = ()) -> None:
        self._settings = settings
        self._without = frozenset(_without)
        self._lock = threading.Lock()
        self._process: LaunchedProgram | None = None
        self._connection: socket.socket | None = None
        self._layers: Layers | None = None

    @property
    def settings(self) -> SandboxSettings:
        return self._settings

    @property
    def layers(self) -> Layers | None:
        return self._layers

    def start(self) -> None:
        """Start the spawner and run a trial program.

        Raises ConfigError if a required layer is missing or a package is not installed, SandboxError if the sandbox
        fails.
        """
        with self._lock:
            self._start_if_needed()

    def run(
        self, program: str, stdin: str = "", *, cpu_seconds: float | None = None, output_bytes: int | None = None
    ) -> RunResult:
        """Run a Python program with this standard input. The arguments override limits of the settings.

        Raises ConfigError or SandboxError if the sandbox does not start or fails.
        """
        with self._lock:
            self._start_if_needed()
            return self._run_program(
                program,
                stdin,
                cpu_seconds=self._settings.timeout_seconds if cpu_seconds is None else cpu_seconds,
                output_bytes=max(self._settings.output_kib << 10, output_bytes or 0),
            )

    def close(self) -> None:
        """Stop the spawner and the current run. Safe to call again, and concurrently with `run`."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # Wakes a thread waiting for it.
        # A thread in `run` holds the lock, and closes its own descriptors.
        with self._lock:
            self._stop_spawner()

    def _stop_spawner(self) -> None:
        connection, process = self._connection, self._process
        self._connection = self._process = None
        if connection is not None:
            connection.close()
        # The spawner exits when its connection closes.
        if process is not None and process.exit_code(_KILL_SECONDS) is None:
            process.kill()

    def _start_if_needed(self) -> None:
        """Start the spawner unless it runs, check its layers, and run a trial program."""
        if self._process is not None and self._process.exit_code() is None:
            return
        self._stop_spawner()
        # If namespaces fail, the spawner is useless. Start another one without them.
        layers_to_try = [layer for layer in LAYERS if layer not in self._without]
        faults: dict[str, str] = dict.fromkeys(self._without, "left out")
        while True:
            layers, new_faults = self._start_spawner(layers_to_try)
            faults |= new_faults
            if layers or "namespaces" not in new_faults:
                break
            self._stop_spawner()
            layers_to_try.remove("namespaces")
        self._layers = Layers(frozenset(layers), faults)
        try:
            self._layers.require_minimum()
            self._layers.require(self._settings.require)
            self._run_trial()
        except BaseException:
            self._stop_spawner()
            raise

    def _start_spawner(self, layers: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Start a spawner process. Returns its active layers, and the reasons for missing ones by name."""
        own_end, spawner_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with spawner_end:
            self._process = self._launch_spawner(layers, spawner_end.fileno())
        self._connection = own_end
        own_end.settimeout(_START_SECONDS)
        text = b""
        with contextlib.suppress(OSError):
            text = own_end.recv(_MAX_MESSAGE_BYTES)
        own_end.settimeout(None)
        if not text:
            self._process.kill()
            with self._process.stderr as errors:
                reason = errors.read().decode(errors="replace")[-2000:].strip()
            self._stop_spawner()
            raise SandboxError(f"the sandbox does not start: {reason or 'its standard error is empty'}")
        self._process.stderr.close()
        answer = json.loads(text)
        return answer["layers"], answer["faults"]

    def _launch_spawner(self, layers: Sequence[str], descriptor: int) -> LaunchedProgram:
        """Launch the spawner with `descriptor`, its end of the connection. Raises ConfigError for a missing package."""
        packages, listable = _find_packages(self._settings.packages)
        interpreter, trees, search_path = _find_python()
        spawner_settings = {
            "layers": layers,
            "trees": sorted({*trees, *packages}),
            "listable": listable,
            "packages": self._settings.packages,
            "search_path": [*search_path, *listable],
        }
        # -P -S -s -B: no paths of this folder or user, no site packages, no bytecode files.
        python_command = [interpreter, "-P", "-S", "-s", "-B", "-c", _SPAWNER]
        return LaunchedProgram(
            [*python_command, str(PACKAGE.parent), str(descriptor), json.dumps(spawner_settings)],
            folder="/",
            environment=_ENVIRONMENT,
            # Discard stdout. Read only stderr, because it has the reason if the start fails.
            stdout=DEVNULL,
            stderr=PIPE,
            descriptors=[descriptor],
        )

    def _run_trial(self) -> None:
        """Run the trial program. Raises SandboxError if its output or user is not as expected."""
        try:
            trial = self._run_program(_TRIAL, "", cpu_seconds=10.0, output_bytes=_PART_BYTES)
        except SandboxError as error:
            reason = str(error)
        else:
            user, _, total = trial.stdout.strip().partition(" ")
            if trial.outcome == "ok" and total == "45" and user != "0":
                return
            reason = f"{trial.outcome}: {trial.stderr.strip()[-500:]}"
        raise SandboxError(
            f"a trial program does not run in the sandbox ({reason}); without namespaces, every user of the machine "
            f"must be able to read Python at {_find_python()[0]} and its library: use a Python outside private folders "
            "such as /root"
        )

    def _run_program(self, program: str, stdin: str, *, cpu_seconds: float, output_bytes: int) -> RunResult:
        """Send the spawner a program and its limits, and collect its output until it ends."""
        assert self._connection is not None
        limits = {"cpu_seconds": cpu_seconds, "memory_bytes": self._settings.memory_mib << 20}
        sent_files: list[int] = []
        own_pipe_ends: list[int] = []
        try:
            for text in (program, stdin):
                sent_files.append(_make_sealed_file(text.encode("utf-8", "surrogatepass")))
            for _ in range(3):
                read_end, write_end = os.pipe2(os.O_CLOEXEC)
                own_pipe_ends.append(read_end)
                sent_files.append(write_end)
            start_time = time.monotonic()
            socket.send_fds(self._connection, [json.dumps(limits).encode()], sent_files)
            # Close these copies, because a pipe ends only when all its writers are closed.
            while sent_files:
                os.close(sent_files.pop())
            assert self._process is not None
            wall_seconds = max(self._settings.wall_seconds, cpu_seconds)
            longest_run_seconds = max(self._settings.longest_seconds or 3 * wall_seconds, wall_seconds)
            run = _Run(
                self._connection, own_pipe_ends, wall_seconds, longest_run_seconds, output_bytes, self._process.pid
            )
            run.read_until_end()
        except OSError as error:
            self._stop_spawner()
            raise SandboxError(f"the sandbox's spawner ended: {error}") from None
        except BaseException:
            self._stop_spawner()  # Late messages of this run must not be taken for another run's.
            raise
        finally:
            for descriptor in (*sent_files, *own_pipe_ends):
                os.close(descriptor)
        return run.make_result(cpu_seconds, time.monotonic() - start_time)


class _Run:
    """A run in progress. Reads its output within limits until it ends or must be killed."""

    def __init__(
        self,
        connection: socket.socket,
        pipes: Sequence[int],
        wall_seconds: float,
        longest_run_seconds: float,
        output_bytes: int,
        spawner: int,
    ) -> None:
        self._connection = connection
        self._stdout, self._stderr, self._status = pipes
        self._wall_seconds, self._longest_run_seconds, self._spawner = wall_seconds, longest_run_seconds, spawner
        self._busy_time = BusyTime(spawner)
        self._free_bytes_by_pipe = {self._stdout: output_bytes, self._stderr: _MAX_ERROR_BYTES, self._status: 4096}
        self._content_by_pipe = {pipe: bytearray() for pipe in pipes}
        self._begin_time: float | None = None
        self._is_overdue = self._is_output_too_long = False
        self._exit_report: dict[str, float] = {}

    def read_until_end(self) -> None:
        """Read the output until the run has ended and its pipes are empty.

        Raises SandboxError if the run cannot be ended.
        """
        poll = select.poll()
        for descriptor in (*self._content_by_pipe, self._connection.fileno()):
            poll.register(descriptor, select.POLLIN)
        num_open = len(self._content_by_pipe)
        is_killed = False
        # Until the program begins, the limit is the machine's start time, not the program's.
        deadline = time.monotonic() + _START_SECONDS
        while num_open or not self._exit_report:
            for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000 + 1):
                if descriptor == self._connection.fileno():
                    self._exit_report = json.loads(self._connection.recv(_MAX_MESSAGE_BYTES) or b"null")
                    if not self._exit_report:
                        raise ConnectionError(
                            "the sandbox's spawner closed the connection before it sent the result of a run"
                        )
                    poll.unregister(descriptor)
                    deadline = time.monotonic() + _KILL_SECONDS
                elif not self._read_pipe(descriptor):
                    poll.unregister(descriptor)
                    num_open -= 1
            if self._begin_time is None and self._content_by_pipe[self._status] == READY:
                self._begin_time = time.monotonic()
                if not self._exit_report:
                    # The first reading registers the run's process. If the process ends later, its busy time since then
                    # still counts.
                    self._busy_time.read()
                    deadline = self._begin_time + self._wall_seconds
            if time.monotonic() >= deadline and (num_open or not self._exit_report):
                if self._exit_report:
                    raise SandboxError("a sandboxed program has ended, but a process that it started is still running")
                if is_killed:
                    raise SandboxError("a sandboxed program is still running after it was killed")
                deadline = self._extend_deadline()
                self._is_overdue = time.monotonic() >= deadline
            if (self._is_overdue or self._is_output_too_long) and not is_killed and not self._exit_report:
                is_killed = True
                deadline = time.monotonic() + _KILL_SECONDS
                self._connection.send(b"kill")

    def _extend_deadline(self) -> float:
        """Return the next deadline of a run, in seconds of `time.monotonic`; in the past: kill the run.

        Only idle time counts, so computing or waiting for a CPU extends the deadline. Raises SandboxError if the
        program has not begun.
        """
        if self._begin_time is None:
            status = bytes(self._content_by_pipe[self._status]).decode(errors="replace")
            raise SandboxError(status or self._explain_missing_start())
        deadline = self._begin_time + min(self._wall_seconds + self._busy_time.read(), self._longest_run_seconds)
        # If the extension is too small to be useful, return a time in the past, so that the run is killed.
        is_useful = deadline >= time.monotonic() + _LEAST_EXTENSION_SECONDS
        return deadline if is_useful else self._begin_time

    def _explain_missing_start(self) -> str:
        if is_stopped(self._spawner):
            cause = f"process {self._spawner}, its parent, is stopped"
        else:
            cause = "this machine is overloaded or has no memory"
        return f"a program has not begun in {_START_SECONDS:g} s: {cause}"

    def _read_pipe(self, pipe: int) -> bool:
        """Read the available bytes of a pipe. Returns False at its end."""
        part = os.read(pipe, _PART_BYTES)
        free_bytes = self._free_bytes_by_pipe[pipe]
        # Read beyond the limit too, so that the program does not block on a full pipe.
        self._content_by_pipe[pipe] += part[:free_bytes]
        self._free_bytes_by_pipe[pipe] = max(0, free_bytes - len(part))
        self._is_output_too_long = self._is_output_too_long or (pipe == self._stdout and len(part) > free_bytes)
        return bool(part)

    def make_result(self, cpu_limit: float, wall_seconds: float) -> RunResult:
        """Return the program's outcome from its exit status, CPU time and exceeded limits."""
        status = bytes(self._content_by_pipe[self._status])
        if status != READY:
            raise SandboxError(status.decode(errors="replace") or "a run ended before its program began")
        cpu_seconds = self._exit_report["cpu_seconds"]
        exit_code = int(self._exit_report["exit_code"])
        outcome: Outcome = "ok" if exit_code == 0 else "error"
        # The CPU limit sends SIGXCPU, then SIGKILL if the program ignored it.
        is_killed = exit_code == 128 + signal.SIGXCPU or (exit_code == 128 + signal.SIGKILL and cpu_seconds > 1)
        if self._is_overdue or cpu_seconds > cpu_limit or is_killed:
            outcome = "timeout"
        elif self._is_output_too_long:
            outcome = "output"
        stdout, stderr = (
            self._content_by_pipe[pipe].decode("utf-8", "replace") for pipe in (self._stdout, self._stderr)
        )
        is_wall_clock_timeout = self._is_overdue and cpu_seconds <= cpu_limit
        return RunResult(
            outcome,
            stdout,
            stderr,
            exit_code,
            cpu_seconds=cpu_seconds,
            wall_seconds=wall_seconds,
            is_wall_clock_timeout=is_wall_clock_timeout,
        )


def _make_sealed_file(content: bytes) -> int:
    """Return the descriptor of a read-only file in memory, positioned at its start."""
    file = os.memfd_create("megarl-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    unwritten = memoryview(content)
    while unwritten:
        unwritten = unwritten[os.write(file, unwritten) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALED)
    return file


@lru_cache(maxsize=1)
def _find_python() -> tuple[str, list[str], list[str]]:
    """Return Python's interpreter outside any virtual environment, the folders that it reads, and its search path."""
    interpreter = getattr(sys, "_base_executable", None) or sys.executable
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    search_path = [str(library), str(library / "lib-dynload")]
    system_folders = [
        folder for folder in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib") if os.path.isdir(folder)
    ]
    return interpreter, [*system_folders, str(Path(sys.base_prefix) / "lib")], search_path


def _find_packages(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the folders (or module files) of packages with their shared libraries, and the parents of these
    folders.
    """
    folders: list[str] = []
    parent_folders: list[str] = []
    # Only plain names, because `find_spec` of a dotted name would import the parent package here.
    for name in names:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not (spec.submodule_search_locations or spec.origin):
            raise ConfigError(
                f"sandbox.packages: {name!r}: there is no such package in this environment; install it, or leave it out"
            )
        if not spec.submodule_search_locations:
            file = Path(spec.origin or "")
            if file.is_file():  # Otherwise it is built into the interpreter.
                folders.append(str(file))
                parent_folders.append(str(file.parent))
            continue
        folder = Path(spec.submodule_search_locations[0])
        # Wheels put shared libraries into a folder NAME.libs next to the package.
        folders += [str(path) for path in (folder, folder.with_name(f"{name}.libs")) if path.is_dir()]
        parent_folders.append(str(folder.parent))
    return folders, sorted(set(parent_folders))
