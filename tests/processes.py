"""Processes, seen from outside."""

from __future__ import annotations

from pathlib import Path

from megarl.platform.processes import descendants


def rank_processes(driver: int) -> dict[int, int]:
    """Process ids of a driver's ranks, by rank: below it, or below the server that a shared one has forked for it."""
    everyone = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    servers = [process for process in everyone if _name(process) == f"megarl {driver}"]
    below = [process for above in (driver, *servers) for process in descendants(above)]
    names = {process: _name(process) for process in below}
    return {int(name.split()[-1]): process for process, name in names.items() if name.startswith("megarl rank ")}


def _name(process: int) -> str:
    """What `ps` shows; empty once it has ended."""
    try:
        return Path(f"/proc/{process}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
