"""Background work of a rank, in a thread. On a GPU the thread has its own CUDA stream.

The main thread and this thread must not share a process group. torch matches a group's collectives by their order on
each rank, but two threads have no common order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from megarl.platform import device

Value = TypeVar("Value")

_POLL_SECONDS = 1e-3
"""Seconds between two checks for the end of the background work."""


def begin(work: Callable[[], Value]) -> Future[Value]:
    """Run `work` in a background thread. Returns a future with its value or error.

    On a GPU the work starts after all kernels queued so far on the current stream.
    """
    future: Future[Value] = Future()
    stream = None
    if device.current().type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())

    def run_on_own_stream() -> None:
        """Run the work on a CUDA stream of its own (on a GPU), and complete the future."""
        try:
            with torch.cuda.stream(stream):
                value = work()
                if stream is not None:
                    # When the future is done, the kernels must have finished, not only be queued.
                    stream.synchronize()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(value)

    # A daemon thread: a rank can exit without waiting for it.
    threading.Thread(target=run_on_own_stream, name="background", daemon=True).start()
    return future


def finish(future: Future[Value]) -> Value:
    """Wait for the work of `begin`. Returns its value or raises its error."""
    while not future.done():
        time.sleep(_POLL_SECONDS)
    return future.result()
