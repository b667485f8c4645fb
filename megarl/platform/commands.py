"""Short commands: programs that the caller waits for."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


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
