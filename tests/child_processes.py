"""Start programs that signals can end, and look at processes from outside."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.processes.process_tree import ENDING_SIGNALS, descendants
from tests.forked_command import FORKED_DRIVER


def start_with_default_signals(command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
    """Start a program that signals end, also where nohup or a script's `&` has made this process ignore them.

    `options` are those of `subprocess.Popen`.
    """
    ignored = [number for number in (*ENDING_SIGNALS, signal.SIGQUIT) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        # A program inherits what is ignored, but never a handler: it gets the default instead.
        signal.signal(number, lambda *_: None)
    try:
        return subprocess.Popen(command, **options)
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def rank_processes(driver: int) -> dict[int, int]:
    """Return the process ids of a driver's ranks, by rank. `driver` may be the command that a driver was forked for.

    They are descendants of the driver, or of the fork server that a shared one has forked for it.
    """
    everyone = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    servers = [process for process in everyone if _name(process) == f"megarl {driver}"]
    below = [process for above in (driver, *servers) for process in descendants(above)]
    names = {process: _name(process) for process in below}
    for process, name in names.items():
        if name == FORKED_DRIVER:
            return rank_processes(process)
    return {int(name.split()[-1]): process for process, name in names.items() if name.startswith("megarl rank ")}


def _name(process: int) -> str:
    """Return the name that `ps` shows, or an empty text once the process has ended."""
    try:
        return Path(f"/proc/{process}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A zombie, or a process being reaped at this moment, does not."""
    try:
        # proc(5): Z is a zombie, X a process between `waitpid` and the end of its entry.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
