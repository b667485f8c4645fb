"""Signals to a run.

Stop signals (time limit, preemption, Ctrl-C, closed terminal) make the run save and stop. SIGQUIT requests the stacks
of all threads.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megarl.loops.task_stacks import task_stacks
from megarl.types import EndedError, MegarlError, PeerLostError, StoppedError

DRIVER_LOG = "driver.log"
"""File in a start's log folder: the screen's lines from the opening of the run folder to the summary. It also has the
stacks written on SIGQUIT. A failed run's error is in status.json.
"""

_ONE_REQUEST_SECONDS = 2.0
"""Two stop signals within this time are one request, except two SIGINT."""


def stop_signals() -> list[signal.Signals]:
    """Return the stop signals, except those ignored when the run started (nohup, a script's `&`)."""
    not_ignored = [
        number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN
    ]
    # Slurm sends SIGUSR1 before the time limit if the job asks for it, and SIGTERM on preemption.
    return [signal.SIGUSR1, signal.SIGTERM, *not_ignored]


@contextmanager
def leaving_on_signals(message: str) -> Iterator[None]:
    """Context whose code a stop signal cancels. Then raises StoppedError with this message."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signal_names: list[str] = []

    def cancel_task(signal_number: signal.Signals) -> None:
        if not signal_names:
            task.cancel()
        signal_names.append(signal_number.name)

    # asyncio replaces the handlers, so remember them for the end of the context.
    earlier_handlers = {signal_number: signal.getsignal(signal_number) for signal_number in stop_signals()}
    for signal_number in earlier_handlers:
        loop.add_signal_handler(signal_number, cancel_task, signal_number)
    try:
        yield
    except asyncio.CancelledError:
        if not signal_names:
            raise
        raise StoppedError(f"{signal_names[0]}: {message}") from None
    finally:
        for signal_number, handler in earlier_handlers.items():
            loop.remove_signal_handler(signal_number)
            # asyncio leaves the default handler, which would end the process at once.
            signal.signal(signal_number, handler)


class StopRequest:
    """Request to save and stop a run. `signal_name` is the first stop signal; None: no request.

    Before `steps_begin` there is nothing to save, so a signal cancels the task in `listening`. Afterwards the first
    signal makes the loop save after its step, and a second one cancels the task. `has_progress`: earlier starts in this
    process trained steps, so signals count as after `steps_begin`.
    """

    def __init__(self, *, has_progress: bool = False) -> None:
        self.signal_name: str | None = None
        self.end_ranks: Callable[[], object] = lambda: None
        """Called at the second signal. Ends the ranks, so that a call to a hanging rank does not delay the
        run's end.
        """
        self._has_steps, self._is_urgent = has_progress, False
        self._notice: Callable[[str], object] = lambda text: None

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def record_signal(self, signal_name: str) -> None:
        """Record the first stop signal, and print what happens next."""
        if self.signal_name is None:
            self.signal_name = signal_name
            self._notice(
                f"{signal_name}: saving as soon as this step allows, then stopping; a second signal ends it now"
                if self._has_steps
                else f"{signal_name}: stopping; no step has begun"
            )

    def steps_begin(self) -> None:
        """Record that training begins, so that there is progress to save."""
        self._has_steps = True

    def refuse_recovery(self, error: Exception, run_folder: Path) -> None:
        """Raise EndedError if a stop was requested before this error, such as a lost rank, ended the ranks."""
        if self.signal_name is not None:
            raise EndedError(
                f"{self.signal_name}: the run ended without saving, because it was interrupted before: {error}; go on "
                f"with: megarl train {run_folder} --resume"
            ) from error

    @contextmanager
    def listening(self, notice: Callable[[str], object], run_folder: Path) -> Iterator[None]:
        """Context that handles stop signals for the calling task. `notice` prints on the terminal.

        After its end, stop signals are only recorded. Raises StoppedError or EndedError if a signal cancelled the task.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._notice, first_request_time = notice, float("inf")

        def handle_signal(signal_number: signal.Signals) -> None:
            nonlocal first_request_time
            # One request can arrive twice: at the batch script and its processes, or through a rank. Ctrl-C pressed
            # twice means two requests.
            is_repeated = self.signal_name is not None and (
                signal_number == signal.SIGINT or loop.time() - first_request_time > _ONE_REQUEST_SECONDS
            )
            if is_repeated:
                self._is_urgent = True
                self.end_ranks()
            if is_repeated or (self.signal_name is None and not self._has_steps):
                task.cancel()
            first_request_time = min(first_request_time, loop.time())
            self.record_signal(signal_number.name)

        signal_numbers = stop_signals()
        for signal_number in signal_numbers:
            loop.add_signal_handler(signal_number, handle_signal, signal_number)
        try:
            yield
        except (asyncio.CancelledError, PeerLostError) as error:
            stop_error = self._explain_end(error, run_folder)
            if stop_error is None:
                raise
            raise stop_error from None
        finally:
            for signal_number in signal_numbers:
                loop.remove_signal_handler(signal_number)
                # Only record signals: they must not interrupt the writing of the run's end. A recovery acts on them
                # later.
                signal.signal(
                    signal_number, lambda signal_number, _: self.record_signal(signal.Signals(signal_number).name)
                )
            self._notice = lambda text: None

    def _explain_end(self, error: BaseException, run_folder: Path) -> MegarlError | None:
        """Return the error for a task that a stop signal ended; None: it has another cause."""
        go_on = f"go on with: megarl train {run_folder} --resume"
        if self._is_urgent:
            # Without a save: the second signal says that there is no time for it.
            return EndedError(
                f"{self.signal_name}, then a second signal: the run exited at once, without saving; {go_on}"
            )
        if self.signal_name is None or isinstance(error, PeerLostError):
            return None
        return StoppedError(f"{self.signal_name}: stopped before a step began; {go_on}")


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Context that raises StoppedError on a stop signal, while there is nothing to save."""

    def raise_stopped(signal_number: int, _: object) -> None:
        raise StoppedError(
            f"{signal.Signals(signal_number).name}: stopped before a step began; start it again with --resume"
        )

    earlier_handlers = {signal_number: signal.getsignal(signal_number) for signal_number in stop_signals()}
    for signal_number in earlier_handlers:
        signal.signal(signal_number, raise_stopped)
    try:
        yield
    finally:
        for signal_number, handler in earlier_handlers.items():
            signal.signal(signal_number, handler)


class StackRequest:
    """Request, by SIGQUIT, for the stacks of all threads. `ask_others` passes it on to the ranks."""

    def __init__(self) -> None:
        self.ask_others: Callable[[], object] = lambda: None


@contextmanager
def stacks_on_quit(logs_folder: Path) -> Iterator[StackRequest]:
    """Context that writes the stacks of all the driver's threads and tasks to `driver.log` on SIGQUIT.

    The run continues.
    """
    request = StackRequest()
    path = logs_folder / DRIVER_LOG

    def write_stacks(*_: object) -> None:
        request.ask_others()
        # Use os.write, because the signal may have interrupted the console or a stream while it held its lock.
        with suppress(OSError, RuntimeError):  # RuntimeError: no event loop runs yet
            os.write(log_file.fileno(), task_stacks(asyncio.get_running_loop()).encode())
        with suppress(OSError):
            os.write(2, f"SIGQUIT: the stacks of driver and ranks are in {logs_folder}\n".encode())

    # faulthandler writes to a file descriptor, so the file stays open within the context.
    with path.open("a") as log_file:
        earlier_handler = signal.signal(signal.SIGQUIT, write_stacks)
        # `chain` calls the Python handler set above after the stacks are written.
        faulthandler.register(signal.SIGQUIT, log_file, all_threads=True, chain=True)
        try:
            yield request
        finally:
            faulthandler.unregister(signal.SIGQUIT)
            signal.signal(signal.SIGQUIT, earlier_handler)
