"""Progress of a run on the screen. A terminal has a live line below the other lines; other output has plain lines only.

The live line has the current phase with its time, the step, the time left and a graph of the reward. Each finished step
gets a line of numbers (`step_table`).
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import rich.console
from rich.live import Live
from rich.text import Text

from megarl.files.atomic import append_whole
from megarl.terminal import Terminal, printable
from megarl.tracking.step_table import LINE_CHARACTERS, StepTable
from megarl.types import MegarlError

MOST_LINES = 200
"""Longer runs print a line for some steps only."""

_SPARKLINE_LENGTH = 24
"""Number of newest steps in the graph of the live line."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_BLOCKS_ASCII = "_.-=+*#%"
_WHEEL = "|/-\\"
_REFRESHES_PER_SECOND = 4


class Closing(NamedTuple):
    """Results in the summary of a finished run."""

    model: str | None
    """Folder of the trained model. None: the run only evaluated."""
    heldout: Mapping[str, tuple[float, float]]
    """First and last value of each validation set's accuracy and mean reward, by metric name."""
    phase_seconds: Mapping[str, float]
    next_commands: Sequence[str]
    resumed_step: int = 0
    """Step of the checkpoint that this start resumed. 0: none."""


class Display:
    """Screen of one run. Any thread may print to it. `live` refreshes the live line in its own thread."""

    def __init__(
        self, console: rich.console.Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Terminal(highlight=False)
        self._clock = clock
        self._phases: list[tuple[str, float]] = []
        self._steps: int | None = None
        self._step: int | None = None
        self._current: int | None = None
        self._first_logged: tuple[int, float] | None = None
        self._last_logged = 0.0
        self._began = clock()
        self._recent_values: deque[float] = deque(maxlen=_SPARKLINE_LENGTH)
        self._has_noted_thinning = False
        self._table = StepTable()
        self._log: Path | None = None

    @property
    def is_live(self) -> bool:
        # rich also reports a terminal if colours are forced (FORCE_COLOR), so ask the file itself too.
        return self.console.is_terminal and not self.console.is_dumb_terminal and self.console.file.isatty()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the live line inside this context, if the output is a terminal."""
        if not self.is_live:
            yield
            return
        with Live(
            console=self.console,
            get_renderable=self.status,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            # Lines of libraries would break up the live line. If stderr is a file, they go there.
            redirect_stderr=sys.stderr.isatty(),
        ) as live:
            live.refresh()
            yield

    @contextmanager
    def logged_to(self, path: Path) -> Iterator[None]:
        """Append all lines printed inside this context to a file, without colours.

        An error that leaves the context becomes the file's last line; the command prints it on the screen.
        """
        self._log = path
        try:
            yield
        except Exception as error:
            self._append(f"error: {error}" if isinstance(error, MegarlError) else f"error: {error!r}")
            raise
        finally:
            self._log = None

    @contextmanager
    def phase(self, name: str, *, is_printed: bool = False) -> Iterator[None]:
        """Show the name of a phase on the live line while this context is open.

        `is_printed`: without a live line, print a line instead.
        """
        if is_printed and not self.is_live:
            self.info(name)
        self._phases.append((name, self._clock()))
        try:
            yield
        finally:
            self._phases.pop()

    def begin_steps(self, steps: int | None) -> None:
        self._steps = self._table.steps = steps

    def begin_step(self, step: int) -> None:
        self._current = step

    def info(self, text: str) -> None:
        self._print(Text(printable(text), style="dim"))

    def warn(self, text: str) -> None:
        self._print(Text(f"warning: {printable(text)}", style="yellow"))

    def step(self, step: int, row: Mapping[str, float], *, evaluation_follows: bool = False) -> None:
        """Print a line with a step's metrics, after a header if one is due.

        Long runs omit most steps without an evaluation. With `evaluation_follows`, a second call prints the
        evaluation's metrics.
        """
        now = self._clock()
        self._first_logged = self._first_logged or (step, now)
        self._step, self._last_logged = step, now
        # SFT and preference runs have no reward, so show their loss.
        tracked_value = row.get("reward/mean", row.get("train/loss", math.nan))
        # One NaN would make all later scales NaN.
        if math.isfinite(tracked_value):
            self._recent_values.append(tracked_value)
        if evaluation_follows or self._has_line(step, row):
            max_characters = min(LINE_CHARACTERS, self.console.width) if self.is_live else LINE_CHARACTERS
            for line in self._table.lines(step, row, self._seconds_left(now), max_characters=max_characters):
                text = Text(line, style="" if line.startswith("step ") else "dim")
                text.highlight_regex(r"^step \S+", "bold")
                self._print(text)

    def close(self, closing: Closing) -> None:
        """Print the summary of a run's end."""
        seconds = round(self._clock() - self._began)
        rows = [("done", f"{self._steps_text(closing.resumed_step)} in {timedelta(seconds=seconds)}")]
        if closing.model is not None:
            rows.append(("model", closing.model))
        for metric, (first_value, last_value) in closing.heldout.items():
            _, set_name, measure, *_ = metric.split("/")
            rows.append((measure, f"{set_name} {first_value:.4g} -> {last_value:.4g}"))
        if shares := _describe_phase_shares(closing.phase_seconds):
            rows.append(("time", shares))
        rows += [("" if index else "next", command) for index, command in enumerate(closing.next_commands)]
        for label, text in rows:
            self._print(Text.assemble((f"{label:<10}", "bold"), text))

    def status(self) -> Text:
        """Return the live line: step, phase, seconds left, and a graph of the reward or loss."""
        now, phases = self._clock(), tuple(self._phases)
        words = [_WHEEL[int(now * _REFRESHES_PER_SECOND) % len(_WHEEL)]]
        if self._current is not None:
            words.append(f"step {self._current}" + (f"/{self._steps}" if self._steps else ""))
        if phases:
            name, began = phases[-1]
            words.append(f"{name} {now - began:.0f} s")
        if (seconds_left := self._seconds_left(now)) is not None:
            words.append(f"{timedelta(seconds=round(seconds_left))} left")
        if self._recent_values:
            words.append(f"{self._sparkline()} {self._recent_values[-1]:.4g}")
        return Text("  ".join(words), style="dim", no_wrap=True, overflow="crop")

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)
        self._append(text.plain)

    def _append(self, line: str) -> None:
        if self._log is not None:
            # Ignore a full disk here: the next line of metrics.jsonl reports it, and ends the run.
            with suppress(OSError):
                append_whole(self._log, f"{printable(line)}\n".encode(errors="replace"))

    def _steps_text(self, resumed_step: int) -> str:
        if self._steps == 0:
            return "evaluation"
        last = self._step or 0
        if not resumed_step:
            return f"{last} steps"
        return f"steps {resumed_step + 1} to {last}" if last > resumed_step else f"no step after {resumed_step}"

    def _has_line(self, step: int, row: Mapping[str, float]) -> bool:
        """Return whether the step gets a line. Long runs print a note at the first omitted step."""
        if self._steps is None or self._steps <= MOST_LINES:
            return True
        if not self._has_noted_thinning:
            self._has_noted_thinning = True
            self.info(f"about {MOST_LINES} of {self._steps} steps have a line here; metrics.jsonl has all")
        assert self._first_logged is not None
        # Always print the first two steps and the last one: they show that the run works, and how it ends.
        is_first_or_last = step in (self._first_logged[0], self._first_logged[0] + 1, self._steps)
        has_evaluation = any(name.startswith("val/") for name in row)
        return is_first_or_last or has_evaluation or step % math.ceil(self._steps / MOST_LINES) == 0

    def _seconds_left(self, now: float) -> float | None:
        """Estimate the seconds left from the mean time of all steps after the first: the first compiles kernels."""
        if self._steps is None or self._first_logged is None or self._step is None:
            return None
        first_step, first_logged_at = self._first_logged
        # A single logged step gives no estimate.
        if self._step <= first_step:
            return None
        seconds_per_step = (self._last_logged - first_logged_at) / (self._step - first_step)
        return max(0.0, seconds_per_step * (self._steps - self._step) - (now - self._last_logged))

    def _sparkline(self) -> str:
        # Copy, because another thread may append.
        return sparkline(tuple(self._recent_values), with_blocks=prints_blocks(self.console))


def prints_blocks(console: rich.console.Console) -> bool:
    return (console.encoding or "").lower().startswith("utf")


def sparkline(values: Sequence[float], *, with_blocks: bool) -> str:
    """Return finite values as a graph of one character each: block characters, or ASCII."""
    blocks = _BLOCKS if with_blocks else _BLOCKS_ASCII
    smallest, largest = min(values), max(values)
    scale = (len(blocks) - 1) / (largest - smallest) if largest > smallest else 0.0
    return "".join(blocks[round((value - smallest) * scale)] for value in values)


def _describe_phase_shares(phase_seconds: Mapping[str, float]) -> str:
    total = sum(phase_seconds.values())
    order = sorted(phase_seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds:.1f} s ({seconds / total:.0%})" for name, seconds in order if seconds >= 0.05)
