"""A process that can be killed with all that it starts: a keeper holds it, a socket connects it with this one."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

_OWN_END_SECONDS = 2.0
"""Limit for a process that closed its connection to end by itself, so that its exit code is known."""
_END_SECONDS = 10.0
"""Limit for the processes of a keeper to end after SIGKILL."""
_KEEPER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from megarl.platform.keeper import keep
keep(int(sys.argv[2]), sys.argv[3] or None, sys.argv[4])
"""


class KillableProcess:
    """A process that runs `server`, a function `package.module:name` of a connection; `connection` is the other end.

    `search_path` is its `sys.path`, `folder` its current one. What it prints goes to `log_file`, within bounds. It ends
    with this process. Raises OSError where the machine can start none.
    """

    def __init__(self, server: str, *, search_path: Sequence[str], folder: str, log_file: str | None) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            # -P: the folder of the script or the current one must not come before the search path.
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-c", _KEEPER, json.dumps(search_path), str(theirs.fileno()), log_file or "",
                 server],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd=folder,
                start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """The keeper's id; the process and all that it started are below it."""
        return self._keeper.pid

    def end(self) -> str:
        """As `kill`, of a process that closed its connection: it may end by itself before."""
        with suppress(subprocess.TimeoutExpired):
            self._keeper.wait(_OWN_END_SECONDS)
        return self.kill()

    def kill(self) -> str:
        """Have the keeper kill all processes and end. Returns how the process ended."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            code = self._keeper.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            code = self._keeper.wait()
        with suppress(OSError):
            # Wakes a thread that waits for an answer; closing alone would not.
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        if code <= 128:
            return f"ended with exit code {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(code - 128).name}"
        return f"ended with exit code {code}"
