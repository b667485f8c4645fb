"""Linux functions for trees of processes: forks, death signals, adoption of orphans, limits.

This module imports only the standard library, because supervisors and interpreters of other libraries load it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals sent by Slurm or a terminal to all processes of a job. Only the driver handles them."""
# From linux/prctl.h; Python has no prctl.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_OUT_OF_MEMORY = 9
"""Exit code of the child in `fault_of` after a MemoryError."""
_FAULT_BYTES = 1000
"""Maximum bytes of a FaultyInputError's text."""
_WALL_PER_CPU_SECOND = 10.0
"""Wall-clock seconds allowed per second of CPU time in `fault_of`, because a busy machine runs slowly."""
# Loaded once: after a raw clone the child should not run the dynamic linker.
_LIBC = ctypes.CDLL(None)


def ignore_ending_signals() -> None:
    """Ignore stop signals sent to the whole job. Child processes of this process get the default handlers back."""
    # A Python handler, not SIG_IGN: exec resets handlers to the default, but keeps ignored signals ignored.
    for signal_number in ENDING_SIGNALS:
        signal.signal(signal_number, lambda *_: None)

    def restore_in_child() -> None:
        for signal_number in ENDING_SIGNALS:
            signal.signal(signal_number, signal.SIG_DFL)
        unblock_signals()

    def unblock_signals() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)

    def block_signals() -> None:
        """Block stop signals during a fork, so no signal reaches the child before `restore_in_child`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)

    os.register_at_fork(before=block_signals, after_in_parent=unblock_signals, after_in_child=restore_in_child)


def die_with(parent: int | None) -> None:
    """Have the kernel kill this process when the thread that started it ends. Exit if `parent` has already ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that ended before the call sends no signal any more. A parent outside of this PID namespace is 0.
    if os.getppid() not in (parent, 0):
        os._exit(1)


def adopt_orphans() -> None:
    """Become the subreaper: orphaned descendants become children of this process (prctl(2))."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def fork(clone: Callable[[], int] = os.fork) -> int:
    """Fork a process leading a session and dying with the calling thread. Return 0 in the child, else the child's id.

    `clone` is the function that forks; it must return what `os.fork` returns. Raises OSError if the limit of processes
    is reached.
    """
    parent = os.getpid()
    child = clone()
    if child == 0:
        os.setsid()
        die_with(parent)
    return child


def fork_child(work: Callable[[], object], clone: Callable[[], int] = os.fork) -> int:
    """Fork a process calling `work`, and return its id. It leads a session, and dies with the calling thread.

    The process exits with 0 after `work`, and with 1 and a traceback after an exception.
    """
    child = fork(clone)
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def send_signal(pid: int, signal_number: signal.Signals) -> None:
    os.kill(pid, signal_number)


def kill_by_descriptor(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kill a process forked by `fork_child`, its descendants and its process group."""
    for process in [*descendants(pid), pid]:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
    # Members of the group outlive the process as orphans. Right after its fork a process leads no group yet.
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def descendants(pid: int) -> Iterator[int]:
    """Yield the descendants of `pid`, parents before children. Some that start or end meanwhile may be missing."""
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
    """Kill and reap all descendants of this process.

    Call `adopt_orphans` first. No other thread may wait for children.
    """
    # One pass may miss new processes. Repeat until no child is left: orphans become children, so none can escape.
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
    """Return the CPU seconds of all descendants of `pid`, also of reaped ones."""
    _, _, *reaped_child_ticks = _cpu_ticks(pid)
    ticks = sum(reaped_child_ticks)
    for descendant in descendants(pid):
        ticks += sum(_cpu_ticks(descendant))
    return ticks / _TICKS_PER_SECOND


def _cpu_ticks(pid: int) -> tuple[int, int, int, int]:
    """Return user and system time of a process, then of its reaped children, in ticks (proc(5), stat)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0, 0, 0, 0
    # The process name, in parentheses, may itself contain spaces and parentheses.
    user, system, children_user, children_system = map(int, stat.rpartition(")")[2].split()[11:15])
    return user, system, children_user, children_system


def limit_memory(limit_bytes: int) -> None:
    """Cap this process's address space at its present size plus `limit_bytes`."""
    # Not the limit alone: thread pools of libraries may have reserved gigabytes of address space already.
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = used_bytes + limit_bytes
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit), hard_limit)
    )


class FaultyInputError(Exception):
    """Raised by `work` in `fault_of`. The text says what is wrong with the input, and begins with a verb."""


def fault_of(work: Callable[[], object], *, seconds: float, memory_bytes: int) -> str | None:
    """Run `work` on untrusted input in a forked process, and return what is wrong with the input; None: nothing.

    The text is the exceeded limit (time or memory), the text of a FaultyInputError, or the signal that ended the
    process. `seconds` is CPU time; wall-clock time may be 10 times as long. Other exceptions of `work` are not faults.
    Deterministic work without a fault also stays within the limits in this process. Output of the child is discarded.
    """
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forks in a process with threads. It is safe here: the child needs no lock held by a thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _try_and_exit(work, writable, seconds, memory_bytes)
    os.close(writable)
    pidfd = os.pidfd_open(child)
    try:
        # RLIMIT_CPU does not count waiting, so a sleeping child needs a limit of wall-clock time.
        if not select.select([pidfd], [], [], _WALL_PER_CPU_SECOND * seconds)[0]:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        # Shorter than the pipe's buffer, so the child never waits for this read.
        text = os.read(readable, _FAULT_BYTES).decode(errors="replace")
    finally:
        os.close(readable)
        os.close(pidfd)
    return (text or None) if code == 0 else _describe_failure(code, seconds, memory_bytes)


def _describe_failure(code: int, seconds: float, memory_bytes: int) -> str:
    """Return how a process of `fault_of` failed, from its exit code (negative: the signal) and its limits."""
    if code == _OUT_OF_MEMORY:
        return f"takes more than {memory_bytes >> 20} MiB of memory"
    # RLIMIT_CPU ends a process by SIGXCPU or SIGKILL.
    if -code in (signal.SIGKILL, signal.SIGXCPU):
        return f"takes more than {seconds:g} s"
    end_cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    # Libraries in Rust and C++ abort if they get no memory.
    return f"takes more than {memory_bytes >> 20} MiB of memory, or crashes ({end_cause})"


def _try_and_exit(work: Callable[[], object], report_pipe: int, seconds: float, memory_bytes: int) -> NoReturn:
    """Run `work` within its limits, write its fault to `report_pipe`, and exit."""
    exit_code = 0
    try:
        _discard_output()
        limit_memory(memory_bytes)
        # RLIMIT_CPU counts whole seconds from the start of the process.
        limit = math.ceil(time.process_time() + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        work()
    except FaultyInputError as fault:
        os.write(report_pipe, str(fault).encode(errors="replace")[:_FAULT_BYTES])
    except BaseException as raised:
        # Libraries wrap a MemoryError in errors of their own, so follow the chain of causes.
        error: BaseException | None = raised
        while error is not None and not isinstance(error, MemoryError):
            error = error.__cause__ or error.__context__
        exit_code = 0 if error is None else _OUT_OF_MEMORY
    finally:
        os._exit(exit_code)


def _discard_output() -> None:
    """Discard the output of this process, and tracebacks of crashes, because the caller reports a fault once."""
    faulthandler.disable()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
