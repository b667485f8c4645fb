"""Host memory of this machine that a process may use. torch is not imported."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_FILE = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def machine_bytes() -> int:
    """Bytes of host memory that this process may use: all of the machine's, or less under a cgroup's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *cgroup_limits()])


def cgroup_limits(cgroup_file: Path = _CGROUP_FILE, root: Path = _CGROUP_ROOT) -> Iterator[int]:
    """Bytes that this process's memory cgroup and each cgroup around it allow; none where there is no limit.

    `cgroup_file` lists the process's cgroups, `root` is where their file system is mounted.
    """
    with contextlib.suppress(OSError):
        for line in cgroup_file.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from _limits_around(root, path, "memory.max")
            elif "memory" in controllers.split(","):
                yield from _limits_around(root / "memory", path, "memory.limit_in_bytes")


def _limits_around(root: Path, path: str, name: str) -> Iterator[int]:
    """The limits in a cgroup's file and in those of all cgroups around it."""
    own = root / path.strip("/")
    for folder in (own, *own.parents):
        if not folder.is_relative_to(root):
            return
        # In a container the path may be the host's, of which only the outer folders are mounted.
        with contextlib.suppress(OSError):
            text = (folder / name).read_text().strip()
            if text != "max":
                yield int(text)
