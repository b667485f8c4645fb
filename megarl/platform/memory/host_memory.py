"""Host memory available to a process on this machine. Does not import torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_FILE = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def machine_bytes() -> int:
    """Return the bytes of host memory that this process may use: the machine's total, or less with a cgroup limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *cgroup_limits()])


def available_bytes(meminfo: Path = _MEMINFO) -> int:
    """Return the bytes of host memory that are free or can be freed, at most what a cgroup limit leaves."""
    for line in meminfo.read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return min(machine_bytes(), int(amount.split()[0]) * 1024)
    return 0


def cgroup_limits(cgroup_file: Path = _CGROUP_FILE, root: Path = _CGROUP_ROOT) -> Iterator[int]:
    """Yield the memory limits, in bytes, of this process's cgroup and its parents.

    `cgroup_file` lists the process's cgroups. `root` is the mount point of the cgroup file system.
    """
    with contextlib.suppress(OSError):
        for line in cgroup_file.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # An empty list of controllers marks cgroup v2 (cgroups(7)); v1 has one line per controller.
            if controllers == "":
                yield from _list_limits_around(root, path, "memory.max")
            elif "memory" in controllers.split(","):
                yield from _list_limits_around(root / "memory", path, "memory.limit_in_bytes")


def _list_limits_around(root: Path, path: str, name: str) -> Iterator[int]:
    """Yield the memory limits, in bytes, of a cgroup and its parents, innermost first."""
    cgroup_folder = root / path.strip("/")
    for folder in (cgroup_folder, *cgroup_folder.parents):
        if not folder.is_relative_to(root):
            return
        # In a container the path may be the host's. Then only its outer folders exist below `root`.
        with contextlib.suppress(OSError):
            text = (folder / name).read_text().strip()
            if text != "max":
                yield int(text)
