"""Process ids: the machine, boot and container in which they are valid, and the state of a process."""

from __future__ import annotations

import os
from pathlib import Path

STATE, START_TICKS = 0, 19
"""Indices into `stat_fields`: the state (T: stopped, Z: zombie), and the start in clock ticks since the boot."""


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name: state, parent, and so on (proc(5)).

    Empty: the process does not exist, or belongs to another user and is hidden (hidepid=2).
    """
    try:
        # A process name may end within a UTF-8 character.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    # The process name, in parentheses, may itself contain spaces and parentheses.
    return stat.rpartition(")")[2].split()
