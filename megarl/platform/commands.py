"""Programs that the caller waits for: short commands, and commands whose output is shown while they run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
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
    """Run a program to its end, at most `seconds` long. Return its exit code and its outputs as texts.

    Raises OSError if it cannot be started. Its subclass TimeoutError means that the program was killed after
    `seconds`.
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


def follow_command(command: Sequence[str], *, captures_output: bool) -> tuple[int, str, str]:
    """Run a program to its end, and pass its error output on to sys.stderr as it comes.

    Its standard output goes to sys.stdout, unless `captures_output`. Returns the exit code, the captured standard
    output ("" otherwise) and the error output. On Ctrl-C the program, which gets the same signal, may end in order.
    """
    # A notebook replaces sys.stdout: its cells do not show what a child writes to the inherited file.
    is_inherited = not captures_output and sys.stdout is sys.__stdout__
    output = None if is_inherited else subprocess.PIPE
    pieces: dict[str, list[str]] = {"output": [], "errors": []}
    with subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        reading = [_Reading(process.stderr, pieces["errors"], sys.stderr)]
        if process.stdout is not None:
            reading.append(_Reading(process.stdout, pieces["output"], None if captures_output else sys.stdout))
        for thread in reading:
            thread.start()
        try:
            process.wait()
        except KeyboardInterrupt:
            process.wait()
        for thread in reading:
            thread.join()
    return process.returncode, "".join(pieces["output"]) if captures_output else "", "".join(pieces["errors"])


class _Reading(threading.Thread):
    """Reads a stream of a child to its end: keeps all lines, and writes them to another stream."""

    def __init__(self, stream: IO[str], kept: list[str], shown_on: IO[str] | None) -> None:
        super().__init__(daemon=True)
        self._stream, self._kept, self._shown_on = stream, kept, shown_on

    def run(self) -> None:
        for line in self._stream:
            self._kept.append(line)
            if self._shown_on is not None:
                self._shown_on.write(line)
                self._shown_on.flush()
