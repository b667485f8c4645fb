"""Containers of apptainer. It has no daemon: each program of an attempt is a call of `apptainer exec`.

New files go to a layer above the image, in memory. This module creates the namespaces with the layer, which end with
their last process. It also creates the network namespace, so that apptainer's settings do not matter.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megarl.platform.commands import run_command
from megarl.processes.process_tree import adopt_orphans, descendants, fork_child, kill_descendants
from megarl.sandbox.containers.command_lines import GET_SCRIPT, PUT_SCRIPT, SHORT_SECONDS, decode_file, pack_files
from megarl.sandbox.containers.root_folder import NETWORK_NAMESPACE, map_users, open_loopback
from megarl.sandbox.kernel import CLONE_NEWNS, CLONE_NEWUSER, MS_NODEV, MS_NOSUID, MS_PRIVATE, MS_REC, clone, mount

# Every Linux has /dev/shm. Only this process sees the layer mounted there: apptainer gives containers another /dev.
_LAYER_FOLDER = "/dev/shm"
"""Folder, in memory, of a container's new files."""
_VARIABLE_PREFIX = "APPTAINERENV_"
"""Apptainer passes the variable APPTAINERENV_NAME to a program as NAME."""


def exec_arguments(settings: Mapping[str, Any], folder: str | None) -> list[str]:
    """Return apptainer's arguments before the program's own. The program starts in the container's `folder`."""
    # Apptainer 1.4.5 prints notices among the errors of the program. `silent` leaves its own fatal errors.
    # `containall` hides the machine's home, /tmp, environment and processes. `no-privs` drops root's rights.
    arguments = ["--silent", "exec", "--containall", "--no-home", "--no-privs", "--overlay", f"{_LAYER_FOLDER}/layer"]
    for bound_folder in settings["folders"]:
        arguments += ["--bind", f"{bound_folder}:{bound_folder}:ro"]
    return [*arguments, "--pwd", folder or "/", settings["image"]]


class ApptainerRuntime:
    """Runs each program below this process, by `apptainer exec` above a common layer of files."""

    # The kernel would also count the user's other processes. So the request loop counts `process_ids` instead.
    has_own_users = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Run `true`, to notice a missing image. Raises OSError."""
        adopt_orphans()
        program = shutil.which("apptainer")
        if program is None:
            raise FileNotFoundError("apptainer is not installed")
        self._program, self._settings = program, settings
        self._run_script("true")

    def command(self, request: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str | None]:
        arguments = exec_arguments(self._settings, request["folder"])
        # Pass them in the environment: options are visible in the list of processes, and some values are an attempt's
        # keys.
        variables = {f"{_VARIABLE_PREFIX}{name}": value for name, value in request["environment"].items()}
        return [self._program, *arguments, *request["command"]], {**os.environ, **variables}, None

    def process_ids(self) -> list[int]:
        return list(descendants(os.getpid()))

    def free_disk_bytes(self) -> int | None:
        space = os.statvfs(_LAYER_FOLDER)
        return space.f_bavail * space.f_frsize

    def kill_all(self) -> None:
        kill_descendants()

    def put(self, folder: str, files: Mapping[str, tuple[int, bytes]]) -> None:
        self._run_script(PUT_SCRIPT, folder, stdin=pack_files(files))

    def get(self, path: str, max_bytes: int) -> bytes:
        return decode_file(self._run_script(GET_SCRIPT, path, str(max_bytes + 1)), path, max_bytes)

    def _run_script(self, script: str, *arguments: str, stdin: str = "") -> str:
        command = [self._program, *exec_arguments(self._settings, None), "sh", "-c", script, "sh", *arguments]
        command_end = run_command(command, seconds=SHORT_SECONDS, stdin=stdin)
        if command_end.returncode != 0:
            raise OSError(" ".join(command_end.stderr.split())[-400:] or f"exit code {command_end.returncode}")
        return command_end.stdout


def start_in_namespaces(
    settings: Mapping[str, Any],
    serve: Callable[[Callable[[], ApptainerRuntime]], None],
    *,
    is_isolated: bool,
    disk_bytes: int,
) -> tuple[int, socket.socket | None]:
    """Create a container's namespaces, and call `serve` in their first process. The container ends with this process.

    `serve` gets a function that starts the container there, and raises OSError if it does not start. With `is_isolated`
    the container can reach only the endpoint. Returns the id of the first process, and a socket listening in the
    container's network, or None.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    user, group = os.geteuid(), os.getegid()
    # Only root may mount. Other users become root of a new user namespace, and apptainer accepts this root.
    flags = CLONE_NEWNS | (CLONE_NEWUSER if user else 0) | (NETWORK_NAMESPACE if is_isolated else 0)
    own_end, child_end = socket.socketpair()

    def start_runtime() -> ApptainerRuntime:
        """In the new namespaces: map users, mount the layer's folder, send the listening socket, start a container."""
        if user:
            map_users(proc, user=user, group=group)
        # Private propagation: no mount below is seen outside this namespace.
        mount("", "/", "", MS_REC | MS_PRIVATE)
        mount("tmpfs", _LAYER_FOLDER, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},mode=0700")
        Path(_LAYER_FOLDER, "layer").mkdir()
        # A socket stays in the network where it was opened, whichever process accepts on it.
        if is_isolated:
            with open_loopback() as listener:
                socket.send_fds(child_end, [b"listening"], [listener.fileno()])
        child_end.close()
        return ApptainerRuntime(settings)

    def run_first_process() -> None:
        own_end.close()
        serve(start_runtime)

    first_process = fork_child(run_first_process, lambda: clone(flags))
    os.close(proc)
    # If this end stayed open, `recv_fds` would never return for a child without a listener.
    child_end.close()
    _, listeners, _, _ = socket.recv_fds(own_end, 16, 1)
    return first_process, socket.socket(fileno=listeners[0]) if listeners else None
