"""The processes of a run, seen from outside."""

from __future__ import annotations

from pathlib import Path


def rank_processes(driver: int) -> dict[int, int]:
    """Process ids of a driver's ranks, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = (process / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        rank = [entry for entry in environment if entry.startswith(b"RANK=")]
        if parent == driver and rank:
            found[int(rank[0][5:])] = int(process.name)
    return found
