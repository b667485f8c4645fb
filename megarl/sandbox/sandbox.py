"""A sandbox of this machine: a program and its input in, its output and its end out."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import megarl
from megarl.sandbox.inside import READY
from megarl.sandbox.layers import LAYERS, Layers
from megarl.sandbox.load import busy_seconds
from megarl.types import ConfigError

_START_SECONDS = 60.0
_KILL_SECONDS = 10.0
_LEAST_EXTENSION_SECONDS = 0.05
_PART_BYTES = 64 << 10
_MAX_ERROR_BYTES = 16 << 10
"""Of standard error; what comes after is dropped."""
_MAX_MESSAGE_BYTES = 64 << 10
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
    "PYTHONHASHSEED": "0",  # the order of a set must not differ from run to run
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_TRIAL = "import colorsys, os\nprint(os.getuid(), sum(range(10)))"
"""Imports what the spawner has not."""

Outcome = Literal["ok", "error", "timeout", "output"]


class SandboxError(Exception):
    """The sandbox itself failed, not the program in it."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """Settings of a sandbox: the recipe's `sandbox`."""

    require: tuple[str, ...] = LAYERS
    url: str | None = None
    timeout_seconds: float = 4.0
    wall_timeout_seconds: float | None = None
    total_timeout_seconds: float = 20.0
    memory_mib: int = 512
    output_kib: int = 64
    packages: tuple[str, ...] = ("numpy",)
    longest_seconds: float | None = None
    """Limit by the clock of a run that computes or waits for a CPU meanwhile; left out, three times that of others."""

    @property
    def wall_seconds(self) -> float:
        """Limit by the clock of a run that does nothing: what it computes, or waits for a CPU, comes on top."""
        return self.wall_timeout_seconds or max(10 * self.timeout_seconds, 30.0)


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a run.

    `outcome`: `ok`: it ended with exit code 0; `error`: with another, or by a signal (128 and its number); `timeout`:
    it took too long; `output`: it printed more than it may. Texts are decoded from UTF-8, other bytes replaced.
    """

    outcome: Outcome
    stdout: str
    stderr: str
    exit_code: int
    cpu_seconds: float
    wall_seconds: float
    retries: int = 0
    """Requests that a server had to be sent again."""
    is_by_clock: bool = False
    """Whether a `timeout` was by the clock, not of CPU time."""


class Sandbox:
    """Runs programs one after the other, each in a process of its own; starts its spawner with the first one.

    May be used by any thread; close it in the end. `_without` are layers to leave out, for tests of the others.
    """

    def __init__(self, settings: SandboxSettings, *, _without: Sequence[str] = ()) -> None:
        self._settings = settings
        self._without = frozenset(_without)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._layers: Layers | None = None

    @property
    def settings(self) -> SandboxSettings:
        return self._settings

    @property
    def found(self) -> Layers | None:
        """The layers that this machine was found to have, None before a start."""
        return self._layers

    def start(self) -> None:
        """Start the spawner and try a program.

        Raises ConfigError where a layer of `require` is missing or a package is not installed, SandboxError where the
        sandbox does not work.
        """
        with self._lock:
            self._started()

    def run(
        self, program: str, stdin: str = "", *, cpu_seconds: float | None = None, output_bytes: int | None = None
    ) -> Ran:
        """Run a program in Python with this standard input; limits other than the settings' may be given.

        Raises as `start`.
        """
        with self._lock:
            self._started()
            return self._run(
                program,
                stdin,
                cpu_seconds=self._settings.timeout_seconds if cpu_seconds is None else cpu_seconds,
                output_bytes=max(self._settings.output_kib << 10, output_bytes or 0),
            )

    def close(self) -> None:
        """End the spawner and what it runs; may be called again, and at the same time as `run`."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes who waits for it
        # Whoever runs a program closes what it uses itself.
        with self._lock:
            self._close()

    def _close(self) -> None:
        connection, process = self._connection, self._process
        self._connection = self._process = None
        if connection is not None:
            connection.close()
        if process is not None:
            try:
                process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _started(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._close()
        # Unsuccessful namespaces leave a process of no use behind; the next one does without.
        tried = [layer for layer in LAYERS if layer not in self._without]
        faults: dict[str, str] = dict.fromkeys(self._without, "left out")
        while True:
            layers, found = self._start(tried)
            faults |= found
            if layers or "namespaces" not in found:
                break
            self._close()
            tried.remove("namespaces")
        self._layers = Layers(frozenset(layers), faults)
        try:
            self._layers.require_least()
            self._layers.require(self._settings.require)
            self._try()
        except BaseException:
            self._close()
            raise

    def _start(self, layers: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        packages, listable = _packages(self._settings.packages)
        interpreter, trees, search_path = _python()
        start = {
            "layers": layers,
            "trees": sorted({*trees, *packages}),
            "listable": listable,
            "packages": self._settings.packages,
            "search_path": [*search_path, *listable],
        }
        root = str(Path(megarl.__file__).parents[1])
        with theirs:
            self._process = subprocess.Popen(
                [interpreter, "-P", "-S", "-s", "-B", "-c", _SPAWNER, root, str(theirs.fileno()), json.dumps(start)],
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                start_new_session=True,
            )
        self._connection = ours
        ours.settimeout(_START_SECONDS)
        text = b""
        with contextlib.suppress(OSError):
            text = ours.recv(_MAX_MESSAGE_BYTES)
        ours.settimeout(None)
        assert self._process.stderr is not None
        if not text:
            self._process.kill()
            with self._process.stderr as errors:
                said = errors.read().decode(errors="replace")[-2000:].strip()
            self._close()
            raise SandboxError(f"the sandbox does not start: {said or 'it says nothing'}")
        self._process.stderr.close()
        told = json.loads(text)
        return told["layers"], told["faults"]

    def _try(self) -> None:
        """Run a program that needs what others need. Raises SandboxError where it does not end as it should."""
        try:
            ran = self._run(_TRIAL, "", cpu_seconds=10.0, output_bytes=_PART_BYTES)
        except SandboxError as error:
            said = str(error)
        else:
            user, _, total = ran.stdout.strip().partition(" ")
            if ran.outcome == "ok" and total == "45" and user != "0":
                return
            said = f"{ran.outcome}: {ran.stderr.strip()[-500:]}"
        raise SandboxError(
            f"a trial program does not run in the sandbox ({said}); without namespaces every user must be able to read "
            f"Python at {_python()[0]} and its library: take one that is not in a private folder such as /root"
        )

    def _run(self, program: str, stdin: str, *, cpu_seconds: float, output_bytes: int) -> Ran:
        assert self._connection is not None
        limits = {"cpu_seconds": cpu_seconds, "memory_bytes": self._settings.memory_mib << 20}
        theirs: list[int] = []
        ours: list[int] = []
        try:
            for text in (program, stdin):
                theirs.append(_sealed(text.encode("utf-8", "surrogatepass")))
            for _ in range(3):
                read, write = os.pipe2(os.O_CLOEXEC)
                ours.append(read)
                theirs.append(write)
            started = time.monotonic()
            socket.send_fds(self._connection, [json.dumps(limits).encode()], theirs)
            while theirs:
                os.close(theirs.pop())
            assert self._process is not None
            wall_seconds = max(self._settings.wall_seconds, cpu_seconds)
            most_seconds = max(self._settings.longest_seconds or 3 * wall_seconds, wall_seconds)
            run = _Run(self._connection, ours, wall_seconds, most_seconds, output_bytes, self._process.pid)
            run.watch()
        except OSError as error:
            self._close()
            raise SandboxError(f"the sandbox's spawner ended: {error}") from None
        except BaseException:
            self._close()  # what it would still say belongs to no other run
            raise
        finally:
            for descriptor in (*theirs, *ours):
                os.close(descriptor)
        return run.result(cpu_seconds, time.monotonic() - started)


class _Run:
    """A run under way: what it prints is read, within bounds, until it ends or must be ended."""

    def __init__(
        self,
        connection: socket.socket,
        pipes: Sequence[int],
        wall_seconds: float,
        most_seconds: float,
        output_bytes: int,
        spawner: int,
    ) -> None:
        self._connection = connection
        self._printed, self._warned, self._status = pipes
        self._wall_seconds, self._most_seconds, self._spawner = wall_seconds, most_seconds, spawner
        self._room = {self._printed: output_bytes, self._warned: _MAX_ERROR_BYTES, self._status: 4096}
        self._read = {pipe: bytearray() for pipe in pipes}
        self._begun: float | None = None
        self._is_late = self._is_too_long = False
        self._ended: dict[str, float] = {}

    def watch(self) -> None:
        """Until the run has ended and its pipes are empty. Raises SandboxError where the machine keeps it from that."""
        poll = select.poll()
        for descriptor in (*self._read, self._connection.fileno()):
            poll.register(descriptor, select.POLLIN)
        num_open = len(self._read)
        is_killed = False
        deadline = time.monotonic() + _START_SECONDS
        while num_open or not self._ended:
            for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000 + 1):
                if descriptor == self._connection.fileno():
                    self._ended = json.loads(self._connection.recv(_MAX_MESSAGE_BYTES) or b"null")
                    if not self._ended:
                        raise ConnectionError("it closed the connection")
                    poll.unregister(descriptor)
                    deadline = time.monotonic() + _KILL_SECONDS
                elif not self._take(descriptor):
                    poll.unregister(descriptor)
                    num_open -= 1
            if self._begun is None and self._read[self._status] == READY:
                self._begun = time.monotonic()
                if not self._ended:
                    deadline = self._begun + self._wall_seconds
            if time.monotonic() >= deadline and (num_open or not self._ended):
                if self._ended:
                    raise SandboxError("a program has ended, and something that it started goes on")
                if is_killed:
                    raise SandboxError("a run that was killed does not end")
                deadline = self._extended()
                self._is_late = time.monotonic() >= deadline
            if (self._is_late or self._is_too_long) and not is_killed and not self._ended:
                is_killed = True
                deadline = time.monotonic() + _KILL_SECONDS
                self._connection.send(b"kill")

    def _extended(self) -> float:
        """The time by which a run ends that has reached its deadline: what it computed or waited for does not count."""
        if self._begun is None:
            said = bytes(self._read[self._status]).decode(errors="replace")
            raise SandboxError(
                said or f"a program has not begun in {_START_SECONDS:g} s: this machine is overloaded or has no memory"
            )
        least = time.monotonic() + _LEAST_EXTENSION_SECONDS
        until = self._begun + min(self._wall_seconds + busy_seconds(self._spawner), self._most_seconds)
        return until if until >= least else self._begun

    def _take(self, pipe: int) -> bool:
        """Read what there is; False at its end."""
        part = os.read(pipe, _PART_BYTES)
        room = self._room[pipe]
        self._read[pipe] += part[:room]
        self._room[pipe] = max(0, room - len(part))
        self._is_too_long = self._is_too_long or (pipe == self._printed and len(part) > room)
        return bool(part)

    def result(self, cpu_limit: float, wall_seconds: float) -> Ran:
        status = bytes(self._read[self._status])
        if status != READY:
            raise SandboxError(status.decode(errors="replace") or "a run ended before its program began")
        cpu_seconds = self._ended["cpu_seconds"]
        exit_code = int(self._ended["exit_code"])
        outcome: Outcome = "ok" if exit_code == 0 else "error"
        # SIGXCPU is the limit's, and SIGKILL where that was ignored.
        is_killed = exit_code == 128 + signal.SIGXCPU or (exit_code == 128 + signal.SIGKILL and cpu_seconds > 1)
        if self._is_late or cpu_seconds > cpu_limit or is_killed:
            outcome = "timeout"
        elif self._is_too_long:
            outcome = "output"
        stdout, stderr = (self._read[pipe].decode("utf-8", "replace") for pipe in (self._printed, self._warned))
        is_by_clock = self._is_late and cpu_seconds <= cpu_limit
        return Ran(outcome, stdout, stderr, exit_code, cpu_seconds, wall_seconds, is_by_clock=is_by_clock)


def _sealed(content: bytes) -> int:
    """A descriptor of a file in memory that nobody can change any more, at its beginning."""
    file = os.memfd_create("megarl-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALED)
    return file


@lru_cache(maxsize=1)
def _python() -> tuple[str, list[str], list[str]]:
    """The interpreter without a virtual environment, the folders that it reads, its search path for modules."""
    interpreter = getattr(sys, "_base_executable", None) or sys.executable
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    search_path = [str(library), str(library / "lib-dynload")]
    system = [
        folder for folder in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib") if os.path.isdir(folder)
    ]
    return interpreter, [*system, str(Path(sys.base_prefix) / "lib")], search_path


def _packages(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The folders of packages with their libraries, files of modules, and the folders that these are in."""
    found: list[str] = []
    places: list[str] = []
    for name in names:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not (spec.submodule_search_locations or spec.origin):
            raise ConfigError(
                f"sandbox.packages: {name!r}: there is no such package in this environment; install it, or leave it out"
            )
        if not spec.submodule_search_locations:
            file = Path(spec.origin or "")
            if file.is_file():  # else it is in the interpreter itself
                found.append(str(file))
                places.append(str(file.parent))
            continue
        folder = Path(spec.submodule_search_locations[0])
        found += [str(place) for place in (folder, folder.with_name(f"{name}.libs")) if place.is_dir()]
        places.append(str(folder.parent))
    return found, sorted(set(places))
