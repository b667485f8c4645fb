"""The process of a rank, and the messages between it and the worker group."""

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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

from megarl.cluster.activity import Activity
from megarl.cluster.messages import Inbox, pack
from megarl.files.atomic import disk_full
from megarl.platform import rendezvous
from megarl.platform.imports import uncollected
from megarl.platform.left_collective import is_left
from megarl.platform.processes import ENDING_SIGNALS
from megarl.platform.spans import Span, record, span
from megarl.types import MegarlError

_asked: str | None = None
"""The last signal to stop that this process received."""
_DEVICE_FAULTS = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS", "EngineDeadError")


def _is_lost(error: Exception) -> bool:
    """Whether an error means that this rank's device or peers are lost; a restart may help then."""
    text = f"{type(error).__name__}: {error}"
    return is_left(error) or isinstance(error, TimeoutError) or any(word in text for word in _DEVICE_FAULTS)


def _report(error: Exception) -> dict[str, Any]:
    """An exception as plain data for the driver, where its class might not unpickle."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    known = error if isinstance(error, MegarlError) else disk_full(error)
    named = next((c.__name__ for c in type(known).__mro__ if c.__module__ == MegarlError.__module__), None)
    return {
        "class": type(error).__qualname__,
        "megarl_class": named,
        "message": str(known or error),
        "traceback": text,
        "echo": is_left(error),
        "lost": _is_lost(error),
        "time": time.time(),
    }


class _Host:
    """The process of a rank, with its worker once that is made."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.activity = Activity()

    def construct(self, path: list[str], worker: str, kwargs: dict[str, Any]) -> None:
        """Put a worker in place; see `WorkerGroup.start`."""
        sys.path[:] = path
        module, _, name = worker.partition(":")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        with uncollected():
            imported = importlib.import_module(module)
        self.worker = getattr(imported, name)(rank=rank, world_size=world_size, **kwargs)

    def bound(self, command: bytes) -> tuple[str, Callable[[], Any]]:
        """The method and the call of a command: a method of the worker, or `part.method`, with its arguments.

        `__init__` makes the worker, `__settle__` tells where the ranks meet, `__activity__` takes what was noted of the
        calls before, `__spans__` begins or ends the recording of spans.
        """
        method, args, kwargs = pickle.loads(command)
        own = {
            "__init__": self.construct,
            "__settle__": rendezvous.settle,
            "__activity__": self.activity.take,
            "__spans__": _record_spans,
        }
        found = own[method] if method in own else operator.attrgetter(method)(self.worker)
        return method, partial(found, *args, **kwargs)

    @contextlib.contextmanager
    def noted(self, method: str) -> Iterator[None]:
        """Note a call, unless it asks for what was noted."""
        if method in ("__activity__", "__spans__"):
            yield
            return
        with self.activity.during(method), span(method):
            yield


def _record_spans(is_on: bool) -> tuple[float, list[Span]]:
    """This process's clock, and the spans that were recorded before."""
    return time.monotonic(), record(is_on)


def note_signals() -> None:
    """Survive signals that ask a job to stop; the next answer reports them to the driver, which saves and ends.

    An operator or a scheduler may send any of them to a rank alone. None may end it, or the run would end unsaved.
    """

    def note(number: int, _: Any) -> None:
        global _asked
        _asked = signal.Signals(number).name

    for number in ENDING_SIGNALS:
        signal.signal(number, note)


def serve(sock: socket.socket, store_port: int = 0) -> None:
    """Serve the rank named by `RANK` until the driver closes its end; first tell it the port of this rank's store."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    note_signals()
    host = _Host()
    with sock:
        sock.set_inheritable(False)
        sock.sendall(pack((True, store_port, None)))
        for command in Inbox(sock):
            try:
                method, call = host.bound(command)
                with host.noted(method):
                    result = call()
                answer = pack((True, result, _asked))
            except Exception as error:
                answer = pack((False, _report(error), _asked))
            command = call = result = None  # a batch is not held until the next command has come
            sock.sendall(answer)
    if hasattr(host.worker, "close"):
        host.worker.close()


def leave() -> NoReturn:
    """End this process at once: Python's finalisation of torch, vLLM and Megatron takes seconds."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(0)


def main(connection: socket.socket) -> NoReturn:
    """Be a rank on this machine: serve it, then end at once."""
    serve(connection)
    leave()
