"""Main function of a child process running megarl's own code."""

from __future__ import annotations

import importlib
import io
import os
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from megarl.processes.frames import Answer, Start, answer_requests
from megarl.processes.process_tree import ENDING_SIGNALS, limit_memory


def run(server: str, descriptor: str) -> NoReturn:
    """Answer requests on the socket `descriptor` by the function `server` (`package.module:name`). Never returns."""
    try:
        connection = socket.socket(fileno=int(descriptor))
        # Programs started by this process must not inherit the connection.
        connection.set_inheritable(False)
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(line_buffering=True)
        _ignore_ending_signals()
        module, _, name = server.partition(":")
        answer_requests(connection, _limit_memory_after(getattr(importlib.import_module(module), name)))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # `_exit` does not wait for threads of a user's code.
    os._exit(0)


def _limit_memory_after(start: Start) -> Start:
    """Return a start function that also limits memory, after `start`. So the memory of imports does not count."""

    def start_then_limit(message: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
        child_process = start(message)
        if message["memory_bytes"] is not None:
            limit_memory(message["memory_bytes"])
        return child_process

    return start_then_limit


def _ignore_ending_signals() -> None:
    """Ignore stop signals sent to the whole job. Child processes of this process get the default handlers back."""
    # A Python handler, not SIG_IGN: exec resets handlers to the default, but keeps ignored signals ignored.
    for number in ENDING_SIGNALS:
        signal.signal(number, lambda *_: None)

    def restore() -> None:
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        unblock()

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)

    def block() -> None:
        """Block stop signals during a fork, so no signal reaches the child before `restore`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)
