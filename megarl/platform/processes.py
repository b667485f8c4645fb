"""Linux's means for processes that belong together: death signals, subreapers, limits."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megarl.types import ConfigError

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that Slurm or a terminal sends to all processes of a job; only the driver handles them."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_OUT_OF_MEMORY = 9
_WALL_PER_CPU_SECOND = 10.0
_MOST_OPEN_FILES = 1 << 20
_OTHER_FILES = 256


def die_with(parent: int | None) -> None:
    """Have the kernel send this process SIGKILL when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the subreaper: the parent of descendants whose own parent ends."""
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
    """Kill and reap all descendants. Needs `adopt_orphans`; no other thread may wait for children."""
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
    """CPU seconds of all descendants of `pid`, those that ended and were waited for included."""
    _, _, *ended = _cpu_ticks(pid)
    ticks = sum(ended)
    for descendant in descendants(pid):
        ticks += sum(_cpu_ticks(descendant))
    return ticks / _TICKS_PER_SECOND


def _cpu_ticks(pid: int) -> tuple[int, int, int, int]:
    """A process's user and system time, and those of the children that it waited for, in ticks (proc(5), stat)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0, 0, 0, 0
    user, system, children_user, children_system = map(int, stat.rpartition(")")[2].split()[11:15])
    return user, system, children_user, children_system


def limit_memory(limit_bytes: int) -> None:
    """Cap this process's address space at what it has now plus the limit: thread pools alone may reserve gigabytes."""
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used_bytes + limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def allow_open_files(number: int) -> int:
    """Raise this process's limit of open files to `number`, as far as it may be raised; returns the limit then."""
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < number:
        limit = min(number, highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, highest))
    return limit


def provide_open_files(number: int, what: str) -> None:
    """Raise this process's limit of open files as far as it may be, for `what` needs so many beside those open now.

    Not beyond a million: programs that close all possible files, one by one, take long. Raises ConfigError.
    """
    is_open = len(os.listdir("/proc/self/fd"))
    allowed = allow_open_files(_MOST_OPEN_FILES)
    if allowed < is_open + number + _OTHER_FILES:
        raise ConfigError(
            f"{what} need {number} open files of the driver, which has {is_open} and keeps {_OTHER_FILES} for other "
            f"things: the hard limit of open files (RLIMIT_NOFILE, `ulimit -Hn`) is {allowed}; raise it to "
            f"{is_open + number + _OTHER_FILES} where the driver is started, or start fewer ranks"
        )


def fault_of(work: Callable[[], object], *, seconds: float, memory_bytes: int) -> str | None:
    """Run work on untrusted input in a forked process, and return which limit of time or memory it broke.

    Returns None if it ended within the limits, whether it raised or not. Deterministic work is then as bounded in this
    process.
    """
    with warnings.catch_warnings():
        # Of threads that the copy does not have: it takes no lock that one of them could hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _try_and_exit(work, seconds, memory_bytes)
    pidfd = os.pidfd_open(child)
    try:
        # A busy machine takes longer than the processor's time that the work is given.
        if not select.select([pidfd], [], [], _WALL_PER_CPU_SECOND * seconds)[0]:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(pidfd)
    if code == _OUT_OF_MEMORY:
        return f"takes more than {memory_bytes >> 20} MiB of memory"
    return None if code == 0 else f"takes more than {seconds:g} s"


def _try_and_exit(work: Callable[[], object], seconds: float, memory_bytes: int) -> NoReturn:
    code = 0
    try:
        limit_memory(memory_bytes)
        limit = math.ceil(time.process_time() + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        work()
    except BaseException as raised:
        error: BaseException | None = raised
        while error is not None and not isinstance(error, MemoryError):
            error = error.__cause__ or error.__context__
        code = 0 if error is None else _OUT_OF_MEMORY
    finally:
        os._exit(code)
