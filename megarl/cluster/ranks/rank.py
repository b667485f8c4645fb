"""Main program of a rank process, which executes the driver's commands."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import operator
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megarl import faults
from megarl.cluster.ranks.activity import Activity, phase_of_method
from megarl.cluster.ranks.messages import Inbox, pack
from megarl.files.atomic import disk_full
from megarl.groups import rendezvous
from megarl.groups.peer_errors import is_peer_loss
from megarl.platform.imports import disable_collector
from megarl.platform.spans import Span, annotation, record, span
from megarl.processes.process_tree import ENDING_SIGNALS
from megarl.types import MegarlError

if TYPE_CHECKING:
    from megarl.platform.torch_profile import Kind, TorchProfile

_stop_signal: str | None = None
"""Last stop signal to this process. Every answer reports it to the driver."""
_DEVICE_FAULTS = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS", "EngineDeadError")
"""Texts of errors that mean a lost GPU or a dead vLLM engine."""


_HOST_MEMORY_FAULTS = ("DefaultCPUAllocator: ", "std::bad_alloc")
"""Texts of torch's and C++ errors that mean exhausted host memory."""


def _is_lost(error: Exception) -> bool:
    """Return whether a device, memory or peer is lost, so a restart may help."""
    text = f"{type(error).__name__}: {error}"
    is_fault = any(word in text for word in _DEVICE_FAULTS)
    return is_peer_loss(error) or isinstance(error, TimeoutError) or is_fault or _is_out_of_memory(error)


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether host memory ran out. A restart may find it free if other processes share it."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in _HOST_MEMORY_FAULTS)


def _describe_error(error: Exception) -> dict[str, Any]:
    """Return an exception as plain data: the driver may be unable to unpickle its class."""
    traceback_text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        # The log may be on a full disk. Even then the driver must get the report.
        print(traceback_text, file=sys.stderr, flush=True)
    user_error = error if isinstance(error, MegarlError) else disk_full(error)
    # The driver raises the error again under its nearest class in `megarl.types`.
    megarl_class = next((c.__name__ for c in type(user_error).__mro__ if c.__module__ == MegarlError.__module__), None)
    return {
        "class": type(error).__qualname__,
        "megarl_class": megarl_class,
        "message": f"out of host memory: {error}" if _is_out_of_memory(error) else str(user_error or error),
        "traceback": traceback_text,
        "echo": is_peer_loss(error),
        "lost": _is_lost(error),
        "time": time.time(),
    }


class _Host:
    """A rank process: its worker object, and the records of its calls."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.activity = Activity()
        self.profile: TorchProfile | None = None

    def construct(self, search_path: list[str], worker: str, kwargs: dict[str, Any]) -> None:
        """Construct the worker "package.module:Class". `search_path` becomes `sys.path`."""
        faults.reach("construct")
        # The worker must be importable as in the driver, whatever program started this interpreter.
        sys.path[:] = search_path
        module, _, name = worker.partition(":")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # With the garbage collector on, a rank's imports take 8.5 s of CPU time instead of 6.3.
        with disable_collector():
            worker_module = importlib.import_module(module)
        # Drop the earlier worker first: if constructing fails, the rank has none.
        self.worker = None
        self.worker = getattr(worker_module, name)(rank=rank, world_size=world_size, **kwargs)

    def decode(self, command: bytes) -> tuple[str, Callable[[], Any]]:
        """Decode a command. Returns the method's name, and a function that executes the call.

        The method is one of the worker's, `part.method` of one of its parts, or one of the process (`host_methods`).
        """
        method, args, kwargs = pickle.loads(command)
        host_methods = {
            "__init__": self.construct,
            "__listen__": _listen_for_store,
            "__settle__": rendezvous.set_rendezvous,
            "__activity__": self.activity.take,
            "__spans__": _record_spans,
            "__arm__": _arm_faults,
            "__step__": faults.begin_step,
            "__profile__": self.begin_profile,
            "__profile_end__": self.end_profile,
        }
        handler = host_methods[method] if method in host_methods else operator.attrgetter(method)(self.worker)
        return method, partial(handler, *args, **kwargs)

    @contextlib.contextmanager
    def record_call(self, method: str) -> Iterator[None]:
        """Context that records a call's busy time, memory and span, except of calls that fetch records."""
        if method in ("__activity__", "__spans__", "__profile__", "__profile_end__", "__arm__", "__step__"):
            yield
            return
        phase = phase_of_method(method)
        ranges = contextlib.nullcontext() if phase is None else annotation(f"phase {phase}")
        with self.activity.record_call(method), ranges, span(method):
            yield

    def begin_profile(self, kinds: Collection[Kind]) -> None:
        """Start a torch profile of this process. Raises ConfigError for `memory` on a CPU."""
        # Imported here: only a profiled run needs it.
        from megarl.platform.torch_profile import TorchProfile

        self.profile = TorchProfile(kinds)
        self.profile.start()

    def end_profile(self, folder: Path, first_rank: int) -> list[str]:
        """Write the profile to a folder, and return the files' names. Raises OSError.

        `first_rank` is the group's first rank in the run. Returns nothing if the process started after the profile
        began.
        """
        if self.profile is None:
            return []
        profile, self.profile = self.profile, None
        return profile.stop(folder, first_rank + int(os.environ["RANK"]))


def _close_worker(worker: Any) -> None:
    if hasattr(worker, "close"):
        worker.close()


def _listen_for_store(address: str) -> int:
    """Listen for the torch store on this address's interface, and return the port; 0 for an empty address."""
    return rendezvous.listen(address) if address else 0


def _arm_faults(text: str, first_rank: int) -> None:
    """Set this process's faults (`faults.VARIABLE`). `first_rank` is the group's first rank in the run."""
    faults.arm(text, str(first_rank + int(os.environ["RANK"])))


def _record_spans(is_on: bool) -> tuple[float, list[Span]]:
    """Start or stop recording spans. Return monotonic seconds, and the spans so far."""
    return time.monotonic(), record(is_on)


def record_stop_signals() -> None:
    """Record stop signals instead of exiting. The next answer reports them, so the driver saves and ends the run.

    An operator or scheduler may signal a single rank. If the rank exited, the run would end unsaved.
    """

    def note(number: int, _: Any) -> None:
        global _stop_signal
        _stop_signal = signal.Signals(number).name

    for number in ENDING_SIGNALS:
        signal.signal(number, note)


def serve(sock: socket.socket) -> None:
    """Execute the driver's commands one after another until the connection ends, then close the worker."""
    faulthandler.enable()
    # The agent asks for stacks by SIGUSR2. The handler is in C: it works while Python waits in a collective.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    record_stop_signals()
    host = _Host()
    with sock:
        # A child holding the socket would keep the connection open after this rank's end.
        sock.set_inheritable(False)
        for command in Inbox(sock):
            try:
                method, call = host.decode(command)
                with host.record_call(method):
                    result = call()
                answer = pack((True, result, _stop_signal))
            except Exception as error:
                answer = pack((False, _describe_error(error), _stop_signal))
            # Free a large batch or result now, not when the next command arrives.
            command = call = result = None
            sock.sendall(answer)
        # Before the connection ends: the agent reports its end as the end of this process.
        _close_worker(host.worker)


def exit_at_once() -> NoReturn:
    """Exit at once: Python's finalisation of torch, vLLM and Megatron would take seconds."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(0)


def main(connection: socket.socket) -> NoReturn:
    serve(connection)
    exit_at_once()
