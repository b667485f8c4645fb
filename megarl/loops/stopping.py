"""Signals that a run handles: those that ask it to stop (time limit, preemption, Ctrl-C, closed terminal), and SIGQUIT,
which asks for stacks.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megarl.types import EndedError, StoppedError

_ONE_REQUEST_SECONDS = 2.0


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to stop, without those that were ignored at its start (nohup, a script's `&`)."""
    kept = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    return [signal.SIGUSR1, signal.SIGTERM, *kept]


class StopRequest:
    """Whether a signal asked the run to save and stop, and which.

    Before `steps_begin` there is nothing to save: a signal cancels the listening task. From then on the first signal
    makes the loop save after its step, and the second cancels the task.
    """

    def __init__(self) -> None:
        self.by: str | None = None
        self._has_steps = self._is_urgent = False
        self._notice: Callable[[str], object] = lambda text: None

    def __bool__(self) -> bool:
        return self.by is not None

    def ask(self, signal_name: str) -> None:
        """Ask the run to save and stop, unless it is asked already."""
        if self.by is None:
            self.by = signal_name
            self._notice(
                f"{signal_name}: saving as soon as this step lets go, then leaving; a second signal ends it now"
                if self._has_steps
                else f"{signal_name}: leaving; no step has begun"
            )

    def steps_begin(self) -> None:
        """The first step begins: from now on there is progress to save."""
        self._has_steps = True

    @contextmanager
    def heard(self, notice: Callable[[str], object], run_folder: Path) -> Iterator[None]:
        """Within it signals are handled for the calling task; `notice` prints on the terminal. Later ones are ignored.

        Raises StoppedError or EndedError if a signal cancelled the task.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._notice, first_at = notice, float("inf")

        def hear(number: signal.Signals) -> None:
            nonlocal first_at
            # One request may come twice, to the batch script and to its processes, or by way of a rank. A key that is
            # pressed twice is meant twice.
            is_repeated = self.by is not None and (
                number == signal.SIGINT or loop.time() - first_at > _ONE_REQUEST_SECONDS
            )
            if is_repeated:
                self._is_urgent = True
            if is_repeated or (self.by is None and not self._has_steps):
                task.cancel()
            first_at = min(first_at, loop.time())
            self.ask(number.name)

        numbers = stop_signals()
        for number in numbers:
            loop.add_signal_handler(number, hear, number)
        try:
            yield
        except asyncio.CancelledError:
            if self.by is None:
                raise
            go_on = f"go on with: megarl train {run_folder} --resume"
            if self._is_urgent:
                raise EndedError(f"{self.by} and then another signal: left at once; {go_on}") from None
            raise StoppedError(f"{self.by}: stopped before a step began; {go_on}") from None
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                # What is left is to write down how the run ended.
                signal.signal(number, signal.SIG_IGN)


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Within it, until a `StopRequest` listens, a signal raises StoppedError: there is nothing to save yet."""

    def leave(number: int, _: object) -> None:
        raise StoppedError(f"{signal.Signals(number).name}: stopped before a step began; start it again with --resume")

    earlier = {number: signal.signal(number, leave) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


class StackRequest:
    """The request for stacks by SIGQUIT; `ask_others`, to be set once there are ranks, asks them too."""

    def __init__(self) -> None:
        self.ask_others: Callable[[], object] = lambda: None


@contextmanager
def stacks_on_quit(logs_folder: Path) -> Iterator[StackRequest]:
    """Within it SIGQUIT writes the stacks of all the driver's threads to `driver.log`; the run goes on."""
    request = StackRequest()
    path = logs_folder / "driver.log"

    def hear(*_: object) -> None:
        request.ask_others()
        # No console and no stream: this may have interrupted them.
        with suppress(OSError):
            os.write(2, f"SIGQUIT: the stacks of driver and ranks are in {logs_folder}\n".encode())

    with path.open("a") as log:
        earlier = signal.signal(signal.SIGQUIT, hear)
        faulthandler.register(signal.SIGQUIT, log, all_threads=True, chain=True)
        try:
            yield request
        finally:
            faulthandler.unregister(signal.SIGQUIT)
            signal.signal(signal.SIGQUIT, earlier)
