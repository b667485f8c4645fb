"""Main function of a child process running megarl's own code."""

from __future__ import annotations

import importlib
import io
import os
import socket
import sys
import traceback
from typing import Any, NoReturn

from megarl.processes.frames import Answer, Start, answer_requests
from megarl.processes.process_tree import ignore_ending_signals, limit_memory


def run(server: str, descriptor: str) -> NoReturn:
    """Answer requests on the socket `descriptor` by the function `server` (`package.module:name`). Never returns."""
    try:
        connection = socket.socket(fileno=int(descriptor))
        # Programs started by this process must not inherit the connection.
        connection.set_inheritable(False)
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(line_buffering=True)
        ignore_ending_signals()
        module, _, name = server.partition(":")
        answer_requests(connection, _add_memory_limit(getattr(importlib.import_module(module), name)))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # `_exit` does not wait for threads of a user's code.
    os._exit(0)


def _add_memory_limit(start: Start) -> Start:
    """Return a start function that calls `start`, then limits this process to `memory_bytes` of the start message.

    The limit comes last, so that the memory of `start`'s imports does not count.
    """

    def start_and_limit_memory(message: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
        introduction, answer = start(message)
        if message["memory_bytes"] is not None:
            limit_memory(message["memory_bytes"])
        return introduction, answer

    return start_and_limit_memory
