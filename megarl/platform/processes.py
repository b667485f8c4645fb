"""What the kernel does for processes that belong together."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = 9
_WALL_PER_CPU_SECOND = 10.0


def die_with(parent: int | None) -> None:
    """Have the kernel kill this process when the thread that started it ends, even amid a computation."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def fault_of(work: Callable[[], object], *, seconds: float, memory_bytes: int) -> str | None:
    """What becomes of work on input that nobody vouches for, tried in a copy of this process that may be killed.

    None if it ends within the limits of time and memory, whether it raises or not; else which limit it broke. Work
    that depends on its input alone is then as bounded in this process.
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
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + memory_bytes, resource.RLIM_INFINITY))
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
