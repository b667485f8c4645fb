"""The space in which process ids of this process are valid: the machine, its boot, and the container."""

from __future__ import annotations

import os
from pathlib import Path


def boot_id() -> str:
    """Return the identity of this machine's boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Return the namespace of process ids: processes of another container have other numbers."""
    return os.readlink("/proc/self/ns/pid")
