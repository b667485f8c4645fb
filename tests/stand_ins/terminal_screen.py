"""A terminal for programs under test: a pseudo-terminal, and the screen that it would show."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path

_PART = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def run_in_terminal(command: Sequence[str], cwd: Path, *, columns: int = 200) -> tuple[int, str]:
    """The exit code of a command that has a terminal of this width, and all that it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm"}
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 1 << 16):
            written += part
    except OSError:  # the last to write has left
        pass
    finally:
        os.close(ours)
        code = process.wait()
    return code, written.decode()


def shown(written: str) -> list[str]:
    """The lines that are left of what was written, without colours. Raises ValueError for an unknown sequence."""
    lines, row, column = [""], 0, 0
    for code, kind, end, text in _PART.findall(written):
        if end == "\r":
            column = 0
        elif end == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif kind == "A":
            row = max(0, row - int(code or 1))
        elif kind == "K":
            lines[row] = "" if code == "2" else lines[row][:column]
        elif text:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
        elif kind not in ("m", "h", "l"):
            raise ValueError(f"sequence {code}{kind}")
    return lines
