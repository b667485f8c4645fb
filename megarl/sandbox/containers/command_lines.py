"""Containers of podman and docker, through their command lines.

A container's main program waits for the end of its input, a pipe from the keeper process. So the container ends with
the keeper, and `--rm` removes it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import signal
import socket
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megarl.files.pid_space import boot_id, pid_namespace, stat_fields
from megarl.platform.commands import run_command
from megarl.processes.launcher import DEVNULL, PIPE, LaunchedProgram
from megarl.processes.process_tree import adopt_orphans, descendants, fork_child, send_signal
from megarl.sandbox.containers.root_folder import open_loopback
from megarl.sandbox.kernel import setns

_START_SECONDS = 300.0
"""Seconds for a container to start, without the download of its image."""
SHORT_SECONDS = 60.0
"""Seconds for any other short command."""
# A waiting shell reaps processes left by programs. As zombies they would use up the limit of processes. `kill_all`
# kills `cat`, so the loop restarts it. At the end of the input, `cat` succeeds and the loop ends.
_MAIN = "until cat; do :; done"
"""Main program of a container, run by its shell until its input ends."""
# podman's root folder is read-only by its mode. Without these capabilities, root could not even create /tests.
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER")
"""Capabilities of root in the container. They apply only to the container's own files."""
# Base64, because `run_command` passes input and output as text, and files are bytes.
PUT_SCRIPT = 'rm -rf "$1" && mkdir -p "$1" && base64 -d | tar -x -f - -C "$1"'
GET_SCRIPT = 'test -f "$1" && head -c "$2" "$1" | base64'


def run_arguments(settings: Mapping[str, Any], owner: int) -> list[str]:
    """Return the arguments of podman or docker that start a container for `owner`, a process id."""
    limits = settings["limits"]
    # Without a pull, a missing image fails at once. A download could exceed `_START_SECONDS`.
    arguments = ["run", "--rm", "--interactive", "--pull=never", "--name", settings["name"]]
    arguments += ["--label", f"{_owner_label()}={owner}", "--cap-drop=ALL"]
    arguments += [*(f"--cap-add={name}" for name in _CAPABILITIES), "--security-opt=no-new-privileges"]
    arguments.append(f"--network={'none' if settings['network'] == 'endpoint' else 'host'}")
    if limits["processes"] is not None:
        arguments.append(f"--pids-limit={limits['processes']}")
    if limits["memory_bytes"] is not None:
        # Equal limits mean no swap.
        arguments += [f"--memory={limits['memory_bytes']}", f"--memory-swap={limits['memory_bytes']}"]
    if limits["cpus"] is not None:
        arguments.append(f"--cpus={limits['cpus']:g}")
    for folder in settings["folders"]:
        arguments += ["--volume", f"{folder}:{folder}:ro"]
    # The image's own entrypoint might not end with its input.
    return [*arguments, "--entrypoint", "sh", settings["image"], "-c", _MAIN]


class CommandLineRuntime:
    """A container of podman or docker. `exec` starts its programs."""

    has_own_users = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start the container. Raises OSError if it does not start."""
        adopt_orphans()
        # When memory runs out, podman's monitor writes a file `oom` into its folder (conmon 2.1). Here it cannot.
        os.chdir("/proc")
        program = shutil.which(settings["kind"])
        if program is None:
            raise FileNotFoundError(f"{settings['kind']} is not installed")
        self._program, self._name = program, settings["name"]
        self._environment = dict(os.environ)
        self._remove_leftovers()
        # If a program inherited the writing end, the container would outlive the keeper.
        read_end, self._input_write_end = os.pipe2(os.O_CLOEXEC)
        with os.fdopen(read_end, "rb") as stdin:
            self._main = LaunchedProgram(
                [program, *run_arguments(settings, os.getppid())], stdin=stdin, stdout=DEVNULL, stderr=PIPE
            )
        self.pid = self._wait_until_running()
        # podman's monitor of the container (conmon) detaches itself, so this process has adopted it.
        self._monitors = frozenset(descendants(os.getpid()))
        """Processes that hold the container. They are not programs of an attempt."""

    def listen(self) -> socket.socket:
        """Return a socket listening on the loopback of the container. Raises OSError."""
        own_end, child_end = socket.socketpair()

        def enter_and_listen() -> None:
            """In a child process: enter the container's network, and send the socket, or the error's text."""
            try:
                # An ordinary user has the rights over the network only within the container's user namespace.
                if os.geteuid() != 0:
                    _enter(self.pid, "user")
                _enter(self.pid, "net")
                with open_loopback() as listener:
                    socket.send_fds(child_end, [b"listening"], [listener.fileno()])
            except OSError as error:
                child_end.send((error.strerror or str(error)).encode())

        child = fork_child(enter_and_listen)
        text, listeners, _, _ = socket.recv_fds(own_end, 1000, 1)
        os.waitpid(child, 0)
        if not listeners:
            raise PermissionError(f"the container's network cannot be entered ({text.decode()})")
        return socket.socket(fileno=listeners[0])

    def command(self, request: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str | None]:
        # Names only: values would show keys of the attempt in the list of processes.
        variable_options = [part for name in request["environment"] for part in ("--env", name)]
        folder_options = ["--workdir", request["folder"]] if request["folder"] else []
        command = [
            self._program,
            "exec",
            "--interactive",
            *variable_options,
            *folder_options,
            self._name,
            *request["command"],
        ]
        return command, {**self._environment, **request["environment"]}, None

    def process_ids(self) -> list[int]:
        return []

    def free_disk_bytes(self) -> int | None:
        return None

    def kill_all(self) -> None:
        """Kill the programs in the container, but neither its first process nor its monitors."""
        # Kill the clients of `exec` first. A client waiting for a reader of its output can block docker's daemon, and
        # so the next `exec`. The monitors must live: they hold the container's input open, and it ends with its input.
        for pid in descendants(os.getpid()):
            if pid not in self._monitors:
                with suppress(OSError):
                    send_signal(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        # `kill -9 -1` spares the container's first process.
        with suppress(OSError):
            self._run_client("exec", self._name, "sh", "-c", "kill -9 -1")

    def put(self, folder: str, files: Mapping[str, tuple[int, bytes]]) -> None:
        self._run_client(
            "exec", "--interactive", self._name, "sh", "-c", PUT_SCRIPT, "sh", folder, stdin=pack_files(files)
        )

    def get(self, path: str, max_bytes: int) -> bytes:
        content = self._run_client("exec", self._name, "sh", "-c", GET_SCRIPT, "sh", path, str(max_bytes + 1))
        return decode_file(content, path, max_bytes)

    def close(self) -> None:
        os.close(self._input_write_end)
        with suppress(OSError):
            self._run_client("rm", "--force", self._name)

    def _wait_until_running(self) -> int:
        """Return the id of the container's first process. Raises OSError without one."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._main.exit_code(0.1) is not None:
                with self._main.stderr as errors:
                    raise OSError(" ".join(errors.read().decode(errors="replace").split())[-400:])
            # `inspect` fails until the container exists. It prints 0 until the first process starts.
            with suppress(OSError):
                pid = int(self._run_client("inspect", "--format", "{{.State.Pid}}", self._name) or 0)
                if pid:
                    return pid
        self.close()
        raise OSError(f"the container did not start within {_START_SECONDS:g} s")

    def _remove_leftovers(self) -> None:
        """Remove containers whose owner has ended. They are left if the daemon was killed together with the owner."""
        containers = self._run_client("ps", "--all", "--quiet", "--filter", f"label={_owner_label()}").split()
        if not containers:
            return
        # Only `inspect` has a template common to podman and docker. It fails if a container was removed meanwhile.
        template = f'{{{{.Id}}}} {{{{index .Config.Labels "{_owner_label()}"}}}}'
        listing = run_command([self._program, "inspect", "--format", template, *containers], seconds=SHORT_SECONDS)
        for line in listing.stdout.splitlines():
            container, _, owner = line.partition(" ")
            # A killed owner may stay as a zombie (Z) for a while.
            if owner.isdigit() and (stat_fields(int(owner)) or ["Z"])[0] == "Z":
                # Another start may remove it at the same time.
                with suppress(OSError):
                    self._run_client("rm", "--force", container)

    def _run_client(self, *arguments: str, stdin: str = "") -> str:
        command_end = run_command([self._program, *arguments], seconds=SHORT_SECONDS, stdin=stdin)
        if command_end.returncode != 0:
            raise OSError(" ".join(command_end.stderr.split())[-400:] or f"exit code {command_end.returncode}")
        return command_end.stdout


def _owner_label() -> str:
    # A daemon also serves other users and namespaces. There, an owner's id is hidden, or means another process.
    owner_scope = f"{boot_id()} {pid_namespace()} {os.geteuid()}"
    return f"megarl-{hashlib.sha256(owner_scope.encode()).hexdigest()[:16]}"


def pack_files(files: Mapping[str, tuple[int, bytes]]) -> str:
    """Return the input of `PUT_SCRIPT` for `files`: relative path to (mode, content)."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, (mode, content) in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), mode & 0o777
            tar.addfile(entry, io.BytesIO(content))
    return base64.b64encode(archive.getvalue()).decode()


def decode_file(text: str, path: str, max_bytes: int) -> bytes:
    """Return the file printed by `GET_SCRIPT`, which prints at most one byte more than `max_bytes`.

    Raises OSError if the file is longer.
    """
    content = base64.b64decode(text)
    if len(content) > max_bytes:
        raise OSError(f"{path} has more than {max_bytes} bytes")
    return content


def _enter(pid: int, namespace: str) -> None:
    descriptor = os.open(f"/proc/{pid}/ns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    setns(descriptor)
    os.close(descriptor)
