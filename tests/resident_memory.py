"""Resident memory of this process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return _bytes("VmRSS")


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far. getrusage would count that of its parent too."""
    return _bytes("VmHWM")


def restart_peak() -> None:
    """Set the peak to the current resident memory."""
    # 5 resets the peak, and nothing else (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")


def _bytes(name: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10
