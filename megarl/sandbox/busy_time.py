"""Time during which the processes of a sandboxed run compute or wait for a CPU."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from megarl.processes.process_tree import descendants


class BusyTime:
    """Seconds during which the processes of a run had a CPU or waited for one.

    The kernel reports this time for living processes only. An ended process counts with its last report. The time from
    there to the next reading is added once for all ended processes.
    """

    def __init__(self, spawner: int) -> None:
        self._spawner = spawner
        self._seconds_by_process: dict[int, float] = {}
        self._seconds_of_ended = 0.0
        self._read_at = time.monotonic()

    def read(self) -> float:
        """Return the busy seconds so far. A living process counts 0 if the kernel does not report its times."""
        now = time.monotonic()
        seconds_by_process = {pid: _busy_seconds(pid) for pid in descendants(self._spawner)}
        ended_processes = self._seconds_by_process.keys() - seconds_by_process.keys()
        if ended_processes:
            # Their busy time since the last reading is unknown. Count that whole interval, once for all of them.
            self._seconds_of_ended += (
                sum(self._seconds_by_process[pid] for pid in ended_processes) + now - self._read_at
            )
        self._seconds_by_process = seconds_by_process
        self._read_at = now
        return sum(seconds_by_process.values()) + self._seconds_of_ended


def _busy_seconds(pid: int) -> float:
    """Return a process's seconds with a CPU or waiting for one. Of its threads only the longest wait counts."""
    computed_nanoseconds, longest_wait_nanoseconds = 0, 0
    # A process may end during the read. The next reading counts it as ended.
    with contextlib.suppress(OSError, ValueError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            schedstat_fields = (thread / "schedstat").read_text().split()
            computed_nanoseconds += int(schedstat_fields[0])
            longest_wait_nanoseconds = max(longest_wait_nanoseconds, int(schedstat_fields[1]))
    return (computed_nanoseconds + longest_wait_nanoseconds) / 1e9
