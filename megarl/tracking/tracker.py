"""One step, written to all who read along: TensorBoard, metrics.jsonl, the console, sample texts."""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import rich.console
from rich.text import Text

from megarl.files.atomic import append_whole, disk_full_named, sync
from megarl.terminal import Terminal
from megarl.tracking.event_file import EventFile
from megarl.tracking.run_folder import RunFolder


class Tracker:
    """Writes the metrics and samples of a run into its folder, and a line a step to the console.

    Adds to each step's scalars, in seconds:
      `time/step_seconds`: wall time since the step before (or since the tracker was made)
      `time/PHASE_seconds`: wall time spent in `phase(PHASE)` during the step
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        headlines: Sequence[str] = (),
        steps: int | None = None,
        console: rich.console.Console | None = None,
    ) -> None:
        """`headlines` are the metrics of the console line, beside held-out accuracy; `steps` is the run's length."""
        self._folder = folder
        self._headlines = tuple(headlines)
        self._steps = steps
        self._console = console or Terminal(highlight=False)
        append_whole(folder.metrics_file, b"")
        self._tensorboard = self._open_tensorboard()
        self._phase_seconds: dict[str, float] = {}
        self._step_started = time.monotonic()
        self._first_logged: tuple[int, float] | None = None
        self._last_step: int | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block to `time/NAME_seconds` of the step that is logged next."""
        started = time.monotonic()
        try:
            yield
        finally:
            key = f"time/{name}_seconds"
            self._phase_seconds[key] = self._phase_seconds.get(key, 0.0) + time.monotonic() - started

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write a step's scalars; steps only grow. A value that is not finite is null in metrics.jsonl."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} is logged after step {self._last_step}; a step is logged once")
        now = time.monotonic()
        timing = {"time/step_seconds": now - self._step_started, **self._phase_seconds}
        row = {name: float(value) for name, value in {**scalars, **timing}.items()}
        self._phase_seconds, self._step_started = {}, now
        append_whole(self._folder.metrics_file, _json_line({"step": step, **row}))
        self._to_tensorboard(lambda events: events.add_scalars(row, step))
        self._first_logged = self._first_logged or (step, now)
        self._last_step = step
        self._print(step, row, now)

    def samples(self, step: int, records: Sequence[Mapping[str, Any]], shown: int = 4) -> None:
        """Add records (prompt, completion, reward...) to samples/step_NNNNNN.jsonl; TensorBoard gets the first `shown`.

        `set` of a record says whose it is: a validation set's, or, where it is left out, training's.
        """
        path = self._folder.samples_folder / f"step_{step:06d}.jsonl"
        append_whole(path, b"".join(map(_json_line, records)))

        def write(events: EventFile) -> None:
            for place, record in enumerate(records[:shown]):
                events.add_text(f"samples/{record.get('set', 'train')}/{place}", _markdown(record), step)

        self._to_tensorboard(write)

    def flush(self) -> None:
        """Have what was logged outlive a crash of the machine, as far as files do."""
        sync(self._folder.metrics_file)
        self._to_tensorboard(EventFile.sync)

    def close(self) -> None:
        """Let go of the files."""
        self._to_tensorboard(EventFile.close)

    def _open_tensorboard(self) -> EventFile | None:
        # Of an interrupted run, TensorBoard is to forget what came after its checkpoint.
        purge_step = self._folder.resumed_step + 1 if self._folder.resumed_step else None
        try:
            with disk_full_named(self._folder.tensorboard_folder):
                return EventFile(self._folder.tensorboard_folder, purge_step=purge_step)
        except OSError as error:
            self._warn_of_tensorboard(error)
            return None

    def _to_tensorboard(self, write: Callable[[EventFile], object]) -> None:
        """Curves are not worth a run: on the first failure say so, and go on without.

        Raises DiskFullError: where curves have no room, neither has anything else.
        """
        if self._tensorboard is None:
            return
        try:
            with disk_full_named(self._folder.tensorboard_folder):
                write(self._tensorboard)
        except OSError as error:
            self._tensorboard = None
            self._warn_of_tensorboard(error)

    def tell(self, text: str) -> None:
        """Say a line to the person at the terminal."""
        self._console.print(text, style="dim", soft_wrap=True, markup=False)

    def notice(self, text: str) -> None:
        """Tell the person at the terminal what they might not expect."""
        self._console.print(f"warning: {text}", style="yellow", soft_wrap=True, markup=False)

    def _warn_of_tensorboard(self, error: OSError) -> None:
        self.notice(
            f"{self._folder.tensorboard_folder}: cannot be written ({error}); going on without TensorBoard, "
            f"{self._folder.metrics_file} has the same numbers"
        )

    def _print(self, step: int, row: Mapping[str, float], now: float) -> None:
        accuracies = [name for name in row if name.startswith("val/") and name.endswith("/accuracy")]
        words = [f"step {step}" + (f"/{self._steps}" if self._steps else "")]
        words += [f"{name} {row[name]:.4g}" for name in dict.fromkeys((*self._headlines, *accuracies)) if name in row]
        words.append(f"{row['time/step_seconds']:.1f} s")
        # The first logged step carries what is only done once: the pace is that of the steps after it.
        if self._steps and self._first_logged and step > self._first_logged[0]:
            pace = (now - self._first_logged[1]) / (step - self._first_logged[0])
            words.append(f"{timedelta(seconds=round(pace * (self._steps - step)))} left")
        line = Text("  ".join(words))
        line.stylize("bold", 0, len(words[0]))
        self._console.print(line, soft_wrap=True)


def _json_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """The value as JSON can say it: arrays as lists, numbers that are not finite as null, text as UTF-8."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        # Half of a surrogate pair, which no file can hold, is written as its escape.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _markdown(record: Mapping[str, Any]) -> str:
    """A record as TensorBoard renders it: each field a heading and, untouched, its text."""
    fields = ((name, value if isinstance(value, str) else repr(value)) for name, value in _plain(record).items())
    return "\n\n".join(f"**{name}**\n\n{textwrap.indent(text, '    ', lambda _: True)}" for name, text in fields)
