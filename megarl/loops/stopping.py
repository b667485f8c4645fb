"""Signals that ask a run to stop: a time limit that comes near, a preemption."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megarl.types import StoppedError

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
_ONE_REQUEST_SECONDS = 2.0


class StopRequest:
    """Whether the run shall save and leave, and by which signal; a second signal ends it at once."""

    def __init__(self) -> None:
        self.by: str | None = None
        self.is_urgent = False
        self._notice: Callable[[str], object] = lambda text: None

    def __bool__(self) -> bool:
        return self.by is not None

    def ask(self, signal_name: str) -> None:
        """Have the run save and leave, if it is not doing so."""
        if self.by is None:
            self.by = signal_name
            self._notice(
                f"{signal_name}: saving as soon as this step lets go, then leaving; a second signal ends it now"
            )

    @contextmanager
    def heard(self, notice: Callable[[str], object]) -> Iterator[None]:
        """Listen while the calling task runs; `notice` tells the terminal. A second signal cancels the task."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        self._notice, first_at = notice, float("inf")

        def hear(number: signal.Signals) -> None:
            nonlocal first_at
            # One request may come twice, to the batch script and to its processes, or by way of a rank.
            if loop.time() - first_at > _ONE_REQUEST_SECONDS and task is not None:
                self.is_urgent = True
                task.cancel()
            first_at = min(first_at, loop.time())
            self.ask(number.name)

        for number in SIGNALS:
            loop.add_signal_handler(number, hear, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Within, until a `StopRequest` listens, a signal raises StoppedError: nothing is under way that could be lost."""

    def leave(number: int, _: object) -> None:
        raise StoppedError(f"{signal.Signals(number).name}: stopped before a step began; start it again with --resume")

    earlier = {number: signal.signal(number, leave) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
