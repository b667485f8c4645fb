"""CPU time and CPU waiting time of a run. On a busy machine, wall-clock time says little."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def busy_seconds(spawner: int) -> float:
    """Return seconds during which the processes below a spawner had a CPU or waited for one.

    In a process, only the thread with the longest wait counts for waiting. 0: the kernel does not report it.
    """
    nanoseconds = 0
    for pid in _below(spawner):
        computed, waited = 0, 0
        # A process may end while it is read; then it simply does not count.
        with suppress(OSError, ValueError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                numbers = (thread / "schedstat").read_text().split()
                computed += int(numbers[0])
                waited = max(waited, int(numbers[1]))
        nanoseconds += computed + waited
    return nanoseconds / 1e9


def _below(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from _below(int(child))
