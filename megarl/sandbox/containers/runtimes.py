"""Runtimes of containers whose programs are child processes of this one."""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megarl.processes.process_tree import adopt_orphans, descendants, kill_descendants, send_signal
from megarl.sandbox.containers.root_folder import HOME_FOLDER, WORK_FOLDER

_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME_FOLDER,
    "USER": "root",
    "LANG": "C.UTF-8",
    "IS_SANDBOX": "1",  # Claude Code runs as root only with it.
}


class MachineRuntime:
    """Programs of this machine, without isolation. They see the machine's files and network."""

    has_own_users = False

    def __init__(self) -> None:
        # Set this before the first program starts, so that no descendant can escape.
        adopt_orphans()

    def command(self, request: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str | None]:
        return request["command"], request["environment"], request["folder"]

    def process_ids(self) -> list[int]:
        return list(descendants(os.getpid()))

    def free_disk_bytes(self) -> int | None:
        return None

    def kill_all(self) -> None:
        kill_descendants()

    def put(self, folder: str, files: Mapping[str, tuple[int, bytes]]) -> None:
        raise OSError(f"{folder}: programs of the machine have no files of their own")

    def get(self, path: str, max_bytes: int) -> bytes:
        raise OSError(f"{path}: programs of the machine have no files of their own")


class NamespaceRuntime:
    """Runs programs below this process, the first one of its namespaces."""

    has_own_users = True

    def command(self, request: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str | None]:
        return request["command"], {**_VARIABLES, **request["environment"]}, request["folder"] or WORK_FOLDER

    def process_ids(self) -> list[int]:
        # Process 1 is this process.
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def free_disk_bytes(self) -> int | None:
        space = os.statvfs(WORK_FOLDER)
        return space.f_bavail * space.f_frsize

    def kill_all(self) -> None:
        """Kill all processes of this process-id namespace except its first, this one."""
        # A program may fork while it is killed, so repeat until no child is left.
        while True:
            # kill(-1) reaches every process of the namespace except this one.
            with suppress(ProcessLookupError):
                send_signal(-1, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def put(self, folder: str, files: Mapping[str, tuple[int, bytes]]) -> None:
        _remove_folder(folder)
        os.makedirs(folder)
        for path, (mode, content) in files.items():
            file_path = os.path.join(folder, path)
            os.makedirs(os.path.dirname(file_path), exist_ok=True)
            with open(file_path, "xb") as file:
                file.write(content)
            os.chmod(file_path, mode & 0o777)

    def get(self, path: str, max_bytes: int) -> bytes:
        # A program may have replaced the file by a pipe or a device. Opening it must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{path} is not a regular file")
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise OSError(f"{path} has more than {max_bytes} bytes")
        return content


def _remove_folder(folder: str) -> None:
    """Remove a folder. If a program replaced a parent folder by a link or a file, remove that too."""
    path = ""
    for name in folder.strip("/").split("/"):
        path += f"/{name}"
        if os.path.islink(path) or (os.path.exists(path) and not os.path.isdir(path)):
            os.unlink(path)
    if os.path.isdir(folder):
        shutil.rmtree(folder)
