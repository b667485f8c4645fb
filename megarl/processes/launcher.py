"""Start of programs. Each leads a separate session, so no signal of a terminal reaches it.

A program ends with its parent in one of three ways. The kernel kills it (`process_tree.die_with`), a supervisor process
does, or its connection to the parent closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from signal import Signals
from typing import IO

Stream = int | IO[bytes] | None
"""One end of a program's input or output: `DEVNULL`, `PIPE`, a file, or None for this process's own."""
PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
_CALL = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
module, _, name = sys.argv[2].partition(":")
work = getattr(importlib.import_module(module), name)(*sys.argv[3:])
if work is not None:
    work()
"""


def python_call(
    function: str, *arguments: str, path: Sequence[str] | None = None, executable: str = sys.executable
) -> list[str]:
    """Return the command of an interpreter calling `function` (`package.module:name`) with `arguments`.

    If the function returns another function, that one is called next. So a forked process has no frames of its server
    on the stack. `path` is the module search path; None: that of this process.
    """
    search_path = json.dumps(list(sys.path if path is None else path))
    # -P: neither the script's folder nor the current one may come before the search path.
    return [executable, "-P", "-c", _CALL, search_path, function, *arguments]


class LaunchedProgram:
    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: Stream = DEVNULL,
        secret: bytes = b"",
        stdout: Stream = None,
        stderr: Stream = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Start the program in `folder` with the variables of `environment`; None: those of this process.

        It inherits `descriptors` under the same numbers. `secret`, at most 64 KiB, replaces `stdin` as standard input.
        Raises OSError if the machine cannot start it.
        """
        self._process = subprocess.Popen(
            command,
            stdin=PIPE if secret else stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=descriptors,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        if secret:
            # Not in the command line or the environment, because other users can read them. A pipe takes 64 KiB without
            # waiting for the reader.
            assert self._process.stdin is not None
            with suppress(BrokenPipeError), self._process.stdin as pipe:
                pipe.write(secret)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> IO[bytes]:
        """Standard error of the program, for the caller to read and close. Only with `PIPE`."""
        assert self._process.stderr is not None
        return self._process.stderr

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """Wait up to `seconds` for the end. Return the exit code, or None if the program still runs.

        A negative code is the number of the signal that killed the program.
        """
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def wait(self) -> int:
        return self._process.wait()

    async def wait_for_end(self) -> int:
        """Wait for the end without blocking the event loop. Return the exit code."""
        code = self._process.poll()
        if code is not None:
            return code
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        # Readable after the end. The process cannot be reaped meanwhile, so the id is still its own.
        pidfd = os.pidfd_open(self.pid)
        loop.add_reader(pidfd, has_ended.set)
        try:
            await has_ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()

    def signal(self, signal_number: Signals) -> None:
        self._process.send_signal(signal_number)

    def kill(self) -> int:
        """Kill the program, but not its children. Reap it and return its exit code."""
        self._process.kill()
        return self._process.wait()
