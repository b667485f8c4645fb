"""A supervised child process, killable with all its descendants and connected by a socket.

Its supervisor (`keeper`) is a process between this one and the child.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

_OWN_END_SECONDS = 2.0
"""Seconds for a process to exit by itself after it closed its connection, so that its exit code is known."""
_END_SECONDS = 10.0
"""Seconds for the supervisor to kill its processes and to exit."""
_KEEPER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from megarl.processes.supervisor import keep
keep(int(sys.argv[2]), sys.argv[3] or None, sys.argv[4])
"""


class KillableProcess:
    """A process that calls `server` (`package.module:name`) with a socket. `connection` is the other end.

    `search_path` becomes its `sys.path`, `folder` its current folder. Its output goes to `log_file`, at most
    `keeper.MAX_LOG_BYTES`. It ends with this process. Raises OSError if the machine cannot start a process.
    """

    def __init__(self, server: str, *, search_path: Sequence[str], folder: str, log_file: str | None) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            # -P: neither the script's folder nor the current one may come before the search path.
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
        """Process id of the supervisor, an ancestor of the process and of all its descendants."""
        return self._keeper.pid

    def end(self) -> str:
        """Wait 2 s for a process that closed its connection, then `kill`. Return how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._keeper.wait(_OWN_END_SECONDS)
        return self.kill()

    def kill(self) -> str:
        """Have the supervisor kill all processes and exit. Return how the process ended, in words."""
        assert self._keeper.stdin is not None
        # The supervisor watches its standard input: the end of file asks it to exit.
        self._keeper.stdin.close()
        try:
            code = self._keeper.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            code = self._keeper.wait()
        with suppress(OSError):
            # shutdown() wakes a thread waiting for an answer; close() alone does not.
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        # Codes above 128 stand for 128 + signal, as in a shell.
        if code <= 128:
            return f"ended with exit code {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(code - 128).name}"
        return f"ended with exit code {code}"
