"""Stacks of a process's threads, in the kernel and in C and C++ functions."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from megarl.files.pid_space import stat_fields
from megarl.platform.commands import resume_process, run_command

_DEBUGGERS = {
    # Also reads Python frames, and faster than gdb.
    "py-spy": ("py-spy", "dump", "--native", "--pid", "PID"),
    "gdb": ("gdb", "-nx", "-batch", "-p", "PID", "-ex", "thread apply all backtrace 40"),
}
"""Programs that print native stacks, best first. PID stands for the process."""


def thread_states(pid: int) -> str:
    """Return a line per thread of a process: name, state, and the kernel function in which it waits.

    State T: stopped. State D: waiting for a disk. Empty: the process does not exist.
    """
    lines = []
    for folder in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda task: int(task.name)):
        # A thread may end meanwhile.
        with suppress(OSError):
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
            place = (folder / "wchan").read_text().strip("0\n") or "user code"
            lines.append(f"thread {folder.name} {status['Name'].strip()}: {status['State'].strip()}, in {place}")
    return "\n".join(lines)


def is_stopped(pid: int) -> bool:
    return stat_fields(pid)[:1] == ["T"]


def native_stacks(pid: int, seconds: float) -> str:
    """Return the native stacks of a process's threads, from py-spy or gdb, or why there are none.

    The process pauses for at most `seconds`. A stopped process stays stopped.
    """
    debugger = next((debugger for debugger in _DEBUGGERS if shutil.which(debugger)), None)
    if debugger is None:
        return "no native stacks: neither py-spy nor gdb is installed"
    command = [str(pid) if part == "PID" else part for part in _DEBUGGERS[debugger]]
    was_stopped = is_stopped(pid)
    try:
        result = run_command(command, seconds=seconds)
        if not result.returncode:
            return result.stdout.strip()
        fault = f"{debugger} ended with code {result.returncode}: {result.stderr.strip()[-400:]}"
    except OSError as error:
        fault = str(error)
    # gdb attaches by SIGSTOP. If gdb is killed, for example at its time limit, the process would stay stopped.
    if not was_stopped:
        resume_process(pid)
    return f"no native stacks: {fault}"
