"""Signals that ask a run to stop: a time limit that comes near, a preemption."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


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
        self._notice = notice

        def hear(number: signal.Signals) -> None:
            if self.by is None:
                self.ask(number.name)
            elif task is not None:
                self.is_urgent = True
                task.cancel()

        for number in SIGNALS:
            loop.add_signal_handler(number, hear, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
