"""Processes, seen from outside."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from megarl.platform.processes import descendants


def rank_processes(driver: int) -> dict[int, int]:
    """Process ids of a driver's ranks, by rank."""
    found: dict[int, int] = {}
    for process in descendants(driver):
        with suppress(OSError):
            name = Path(f"/proc/{process}/comm").read_text()
            if name.startswith("megarl rank "):
                found[int(name.split()[-1])] = process
    return found


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
