"""Start of containers that outlive their host, and connection of a later host.

They listen on a Unix socket of this machine. Their supervisor has no parent process, and ends with the lease.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from megarl.files.shipped import PACKAGE
from megarl.processes.launcher import DEVNULL, LaunchedProgram

# Not TMPDIR: a node's agent sets it to a private folder, which it removes at its end.
_FOLDER = "/tmp/megarl-containers-{user}"
_NEW_SECONDS = 60.0
"""Minimum age in seconds of a socket's file before it may be removed."""
_SUPERVISOR = """
import json, sys
sys.path.append(sys.argv[1])
from megarl.processes.supervisor import supervise
supervise(json.loads(sys.argv[2]))
"""


def launch_outliving(
    name: str, command: Sequence[str], environment: Mapping[str, str]
) -> tuple[LaunchedProgram, socket.socket]:
    """Start a container's keeper under a supervisor that outlives this process.

    Returns the supervisor and a connection to the keeper. Raises OSError.
    """
    folder = _make_socket_folder()
    _remove_ended_sockets(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(folder / _socket_file_name(name)))
        listener.listen()
        listener_descriptor = listener.fileno()
        settings = {
            "command": [*command, str(listener_descriptor)],
            "control": None,
            "connection": listener_descriptor,
            "log_file": None,
            "end_seconds": 0.0,
        }
        # Connect before the start. If the host were killed in between, the keeper would wait for a host for ever.
        connection = connect_to_container(name)
        try:
            supervisor = LaunchedProgram(
                [sys.executable, "-I", "-S", "-B", "-c", _SUPERVISOR, str(PACKAGE.parent), json.dumps(settings)],
                environment=environment,
                stdout=DEVNULL,
                stderr=DEVNULL,
                descriptors=[listener_descriptor],
            )
        except BaseException:
            connection.close()
            raise
        return supervisor, connection


def connect_to_container(name: str) -> socket.socket:
    """Connect to a container of this machine by its name. Raises OSError if it does not exist."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.fspath(_make_socket_folder() / _socket_file_name(name)))
    except BaseException:
        connection.close()
        raise
    return connection


def remove_socket(name: str) -> None:
    with suppress(OSError):
        (_make_socket_folder() / _socket_file_name(name)).unlink(missing_ok=True)


def socket_folder() -> Path:
    """The folder with this user's container sockets. It may not exist."""
    return Path(_FOLDER.format(user=os.geteuid()))


def _make_socket_folder() -> Path:
    """Return the socket folder, private to this user. Raises OSError."""
    folder = socket_folder()
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    folder_status = folder.lstat()
    # Another user may have created the folder first, and could then reach the containers.
    if not stat.S_ISDIR(folder_status.st_mode) or folder_status.st_uid != os.geteuid() or folder_status.st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to another user, or others can read it; remove it")
    return folder


@cache
def _remove_ended_sockets(folder: Path) -> None:
    """Remove the sockets of containers that ended without a host. The cache limits this to once per process."""
    for file in folder.iterdir():
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                # A new container's socket refuses connections until it listens, like an ended container's.
                if time.time() - file.lstat().st_mtime < _NEW_SECONDS:
                    continue
                # A blocking call would wait if a living keeper's queue is full.
                probe.setblocking(False)
                probe.connect(os.fspath(file))
            except ConnectionRefusedError:
                file.unlink(missing_ok=True)
            except OSError:
                pass


def _socket_file_name(name: str) -> str:
    # A socket's path has at most 107 bytes (unix(7)), so hash the name.
    return hashlib.sha256(name.encode()).hexdigest()[:32]
