"""Start programs that signals can end, and look at processes from outside."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
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


def rank_processes(command: int) -> dict[int, int]:
    """Return the process ids of a run's ranks, by rank. `command` is the process of its command or of its driver.

    They are descendants of the driver, or of the fork server that a shared one has forked for it.
    """
    names = {process: process_name(process) for process in _started_by(driver_process(command))}
    return {int(name.split()[-1]): process for process, name in names.items() if name.startswith("megarl rank ")}


def driver_process(command: int) -> int:
    """Return the process of a command's driver: the one that a shared server has forked for it, or the command."""
    return next((process for process in _started_by(command) if process_name(process) == FORKED_DRIVER), command)


def _started_by(process: int) -> list[int]:
    """Return the descendants of a process, and those of the fork servers that a shared one has forked for any of them.

    An agent, for example, is a child of the driver, and such a server of an agent is not.
    """
    names = {int(folder.name): process_name(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")}
    started = [process]
    for above in started:
        servers = [other for other, name in names.items() if name == f"megarl {above}"]
        children = [below for parent in (above, *servers) for below in descendants(parent)]
        started += [below for below in (*servers, *children) if below not in started]
    return started[1:]


def processes_writing_to(folder: Path, log: str, command: str) -> list[int]:
    """Return the processes whose output goes to a log file of this name below `folder`.

    Their command line contains `command`. It leaves out processes that a rank has started.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # Processes may end meanwhile.
        with suppress(OSError):
            output = (process / "fd/1").readlink()
            if output.name != log or not output.is_relative_to(folder.resolve()):
                continue
            if command in (process / "cmdline").read_text():
                found.append(int(process.name))
    return found


def process_name(process: int) -> str:
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
