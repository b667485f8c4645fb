"""Work of a rank beside its main thread: in a thread, on a GPU with a stream of its own.

The two threads share no group of ranks: a group's collectives are matched by the order in which each rank began them.
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

_NAP_SECONDS = 1e-3


def begin(work: Callable[[], Value]) -> Future[Value]:
    """Do this in a thread, after what the device was given so far; its value, or its error."""
    done: Future[Value] = Future()
    stream = None
    if device.current().type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())

    def run() -> None:
        try:
            with torch.cuda.stream(stream):
                value = work()
                if stream is not None:
                    stream.synchronize()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(value)

    # A rank that ends waits for no thread.
    threading.Thread(target=run, name="beside", daemon=True).start()
    return done


def finish(begun: Future[Value]) -> Value:
    """Wait for what was begun; its value, or its error is raised."""
    while not begun.done():
        time.sleep(_NAP_SECONDS)
    return begun.result()
