"""Runs other programs and waits for their end. Also resumes stopped processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO


def run_command(
    command: Sequence[str],
    *,
    seconds: float | None = None,
    folder: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, at most `seconds` long. Returns its exit code and outputs as texts.

    Raises OSError if it cannot be started, and its subclass TimeoutError if it was killed after `seconds`.
    """
    try:
        return subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            cwd=folder,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} did not end within {seconds:g} s") from None


def resume_process(pid: int) -> None:
    """Resume a stopped process. Does nothing if it runs, has ended, or belongs to another user."""
    with suppress(OSError):
        os.kill(pid, signal.SIGCONT)


_NUM_ERROR_LINES = 200
"""Number of last error lines to return. A run of days may write many warnings before its error."""


def follow_command(command: Sequence[str], *, captures_output: bool) -> tuple[int, str, str]:
    """Run a program to its end, and copy its error output to sys.stderr as it comes.

    Its standard output goes to sys.stdout, unless `captures_output`. Returns the exit code, the captured output and the
    last lines of the error output. On Ctrl-C the program gets the same signal: wait for its end, then raise
    KeyboardInterrupt.
    """
    sys.stdout.flush()
    # A notebook replaces sys.stdout. Its cells do not show a child's output to the inherited file.
    is_inherited = not captures_output and sys.stdout is sys.__stdout__
    output = None if is_inherited else subprocess.PIPE
    captured_lines: deque[str] = deque(maxlen=None if captures_output else 0)
    errors: deque[str] = deque(maxlen=_NUM_ERROR_LINES)
    with subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        readers = [_StreamReader(process.stderr, errors, sys.stderr)]
        if process.stdout is not None:
            readers.append(_StreamReader(process.stdout, captured_lines, None if captures_output else sys.stdout))
        for thread in readers:
            thread.start()
        try:
            process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
        for thread in readers:
            thread.join()
    return process.returncode, "".join(captured_lines), "".join(errors)


def run_in_foreground(command: Sequence[str]) -> int:
    """Run a program to its end in this process's terminal, and return its exit code.

    SIGTERM and SIGHUP are passed on. SIGINT is not, because the terminal sends it to the program anyway. If a signal
    ended the program, the code is 128 + the signal's number, as in a shell. Call this in the main thread.
    """
    early_signals: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_to_program(number: int, _: object) -> None:
        if process is None:
            early_signals.append(number)
        else:
            process.send_signal(number)

    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: pass_to_program, signal.SIGHUP: pass_to_program}
    earlier_handlers = {number: signal.getsignal(number) for number in handlers}
    try:
        # Set before the start, so that no signal ends this process alone. The program inherits no function, but it
        # shall inherit that a signal is ignored, as under nohup.
        for number, handler in handlers.items():
            if earlier_handlers[number] != signal.SIG_IGN:
                signal.signal(number, handler)
        with subprocess.Popen(command) as process:
            # The program may catch a signal that it inherited as ignored, so pass on these too.
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for number in early_signals:
                process.send_signal(number)
            code = process.wait()
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


class _StreamReader(threading.Thread):
    """Thread that reads a child's stream to its end. It appends lines to `lines`, and copies them to `shown_on`."""

    def __init__(self, stream: IO[str], lines: deque[str], shown_on: IO[str] | None) -> None:
        super().__init__(daemon=True)
        self._stream, self._lines, self._shown_on = stream, lines, shown_on

    def run(self) -> None:
        """Read the child's lines until its end, and copy them to `shown_on` while that works."""
        for line in self._stream:
            self._lines.append(line)
            if self._shown_on is not None:
                try:
                    self._shown_on.write(line)
                    self._shown_on.flush()
                except (OSError, ValueError):
                    # The copy fails: a closed pipe, a full disk, or a character that the stream lacks. Continue
                    # reading: the child would wait for ever at a full pipe.
                    self._shown_on = None
