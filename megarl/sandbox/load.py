"""How long a run has computed and waited for a CPU: on a busy machine its time by the clock says little."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def busy_seconds(spawner: int) -> float:
    """Seconds that the processes below a spawner have had a CPU, or waited for one; 0 where the kernel does not tell.

    Of a process's threads the one counts that waited longest.
    """
    nanoseconds = 0
    for pid in _below(spawner):
        computed, waited = 0, 0
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
