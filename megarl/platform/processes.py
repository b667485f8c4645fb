"""What the kernel does for processes that belong together."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def die_with(parent: int | None) -> None:
    """Have the kernel kill this process when the thread that started it ends, even amid a computation."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, instead of process 1."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> Iterator[int]:
    """The processes below `pid`, each parent before its children; those that start or end meanwhile may be missed."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for thread in threads:
        with suppress(OSError):
            for child in (thread / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def kill_descendants() -> None:
    """Kill and reap all below this process. It must adopt orphans, and no other thread may wait for children."""
    while True:
        for pid in list(descendants(os.getpid())):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def cpu_seconds_below(pid: int) -> float:
    """CPU seconds of the processes below `pid`, those that ended and were waited for included."""
    _, _, *ended = _cpu_ticks(pid)
    ticks = sum(ended)
    for descendant in descendants(pid):
        ticks += sum(_cpu_ticks(descendant))
    return ticks / _TICKS_PER_SECOND


def _cpu_ticks(pid: int) -> tuple[int, int, int, int]:
    """A process's own time in user and system mode, and that of the children that it waited for (proc(5), stat)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0, 0, 0, 0
    user, system, children_user, children_system = map(int, stat.rpartition(")")[2].split()[11:15])
    return user, system, children_user, children_system
