"""A run's progress on the screen: a live line below the others on a terminal, plain lines alone elsewhere.

The live line has what the run is at and for how long, the step, the time left and the course of the reward. A step's
own line shows together what gives a hacked reward away: reward, accuracy, length, share of truncated, KL where there is
one, the gap between trainer and engine, entropy.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import rich.console
from rich.live import Live
from rich.text import Text

from megarl.terminal import Terminal
from megarl.tracking.health import is_accuracy

MOST_LINES = 200
"""Steps of a run up to which each has a line."""

STEP_LINE = (
    ("divergence", ("distillation/divergence", "distillation/reverse_kl")),
    ("reward", ("reward/mean",)),
    ("accuracy", ("reward/accuracy", "preference/accuracy")),
    ("length", ("rollout/completion_tokens/mean",)),
    ("truncated", ("rollout/truncated",)),
    ("KL", ("kl/reference", "kl/update")),
    ("gap", ("logprob_gap/mean",)),
    ("entropy", ("train/entropy",)),
    ("tokens/s/rank", ("perf/tokens_per_second_per_rank",)),
)
"""The words of a step's line: a label, and the metrics of which it shows the first that there is."""

_COURSE_LENGTH = 24
_BLOCKS = "▁▂▃▄▅▆▇█"
_BLOCKS_ASCII = "_.-=+*#%"
_WHEEL = "|/-\\"
_REFRESHES_PER_SECOND = 4


class Closing(NamedTuple):
    """The facts that a finished run leaves its user with."""

    model: str | None
    """The folder of the trained model."""
    accuracies: Mapping[str, tuple[float, float]]
    """The first and the last accuracy of each validation set."""
    phase_seconds: Mapping[str, float]
    next_commands: Sequence[str]
    resumed_step: int = 0
    """The step that the run went on from; 0: it is its first attempt."""


class Display:
    """The screen of one run. Prints from any thread; `live` refreshes from one of its own."""

    def __init__(
        self, console: rich.console.Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` is in seconds."""
        self.console = console or Terminal(highlight=False)
        self._clock = clock
        self._phases: list[tuple[str, float]] = []
        self._steps: int | None = None
        self._step: int | None = None
        self._current: int | None = None
        self._first_logged: tuple[int, float] | None = None
        self._last_logged = 0.0
        self._began = clock()
        self._course: deque[float] = deque(maxlen=_COURSE_LENGTH)
        self._has_told_thinning = False

    @property
    def is_live(self) -> bool:
        """Whether there is a terminal that a line can be rewritten on, whatever colours are forced."""
        return self.console.is_terminal and not self.console.is_dumb_terminal and self.console.file.isatty()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Within, a terminal has the live line; it is gone afterwards."""
        if not self.is_live:
            yield
            return
        with Live(
            console=self.console,
            get_renderable=self.status,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            # Lines of libraries would be written into the live one; a file that they go to keeps them.
            redirect_stderr=sys.stderr.isatty(),
        ) as live:
            live.refresh()
            yield

    @contextmanager
    def phase(self, name: str, *, is_told: bool = False) -> Iterator[None]:
        """Within, the run is at this; with `is_told` it has a line of its own where there is no live one."""
        if is_told and not self.is_live:
            self.tell(name)
        self._phases.append((name, self._clock()))
        try:
            yield
        finally:
            self._phases.pop()

    def begin_steps(self, steps: int | None) -> None:
        """Set the run's number of steps."""
        self._steps = steps

    def begin_step(self, step: int) -> None:
        """The run is at this step now."""
        self._current = step

    def tell(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, style="dim", soft_wrap=True, markup=False)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.console.print(f"warning: {text}", style="yellow", soft_wrap=True, markup=False)

    def step(self, step: int, row: Mapping[str, float]) -> None:
        """Print the line of a step with these metrics; of a long run those of some steps, and all evaluated ones."""
        now = self._clock()
        self._first_logged = self._first_logged or (step, now)
        self._step, self._last_logged = step, now
        followed = row.get("reward/mean", row.get("train/loss", math.nan))
        if math.isfinite(followed):
            self._course.append(followed)
        if self._has_line(step, row):
            line = Text("  ".join(self._words(step, row)))
            line.stylize("bold", 0, line.plain.find("  "))
            self.console.print(line, soft_wrap=True)

    def close(self, closing: Closing) -> None:
        """Print the summary of a finished run."""
        seconds = round(self._clock() - self._began)
        rows = [("done", f"{self._told_steps(closing.resumed_step)} in {timedelta(seconds=seconds)}")]
        if closing.model is not None:
            rows.append(("model", closing.model))
        for name, (before, after) in closing.accuracies.items():
            rows.append(("accuracy", f"{name} {before:.4g} -> {after:.4g}"))
        if told := _shares(closing.phase_seconds):
            rows.append(("time", told))
        rows += [("" if number else "next", command) for number, command in enumerate(closing.next_commands)]
        for label, text in rows:
            self.console.print(Text.assemble((f"{label:<10}", "bold"), text), soft_wrap=True)

    def status(self) -> Text:
        """The live line, as it is now."""
        now, phases = self._clock(), tuple(self._phases)
        words = [_WHEEL[int(now * _REFRESHES_PER_SECOND) % len(_WHEEL)]]
        if self._current is not None:
            words.append(f"step {self._current}" + (f"/{self._steps}" if self._steps else ""))
        if phases:
            name, began = phases[-1]
            words.append(f"{name} {now - began:.0f} s")
        if (left := self._seconds_left(now)) is not None:
            words.append(f"{timedelta(seconds=round(left))} left")
        if self._course:
            words.append(f"{self._sparkline()} {self._course[-1]:.4g}")
        return Text("  ".join(words), style="dim", no_wrap=True, overflow="crop")

    def _told_steps(self, resumed_step: int) -> str:
        """The steps of this attempt in words."""
        if self._steps == 0:
            return "evaluation"
        last = self._step or 0
        if not resumed_step:
            return f"{last} steps"
        return f"steps {resumed_step + 1} to {last}" if last > resumed_step else f"no step after {resumed_step}"

    def _has_line(self, step: int, row: Mapping[str, float]) -> bool:
        if self._steps is None or self._steps <= MOST_LINES:
            return True
        if not self._has_told_thinning:
            self._has_told_thinning = True
            self.tell(f"of {self._steps} steps about {MOST_LINES} have a line here; metrics.jsonl has all")
        assert self._first_logged is not None
        is_end = step in (self._first_logged[0], self._first_logged[0] + 1, self._steps)
        return is_end or step % math.ceil(self._steps / MOST_LINES) == 0 or any(n.startswith("val/") for n in row)

    def _words(self, step: int, row: Mapping[str, float]) -> list[str]:
        words = [f"step {step}" + (f"/{self._steps}" if self._steps else "")]
        for label, names in STEP_LINE:
            found = next((row[name] for name in names if name in row), None)
            if found is not None:
                words.append(f"{label} {found:.4g}")
        if "reward/mean" not in row and "train/loss" in row:
            words.append(f"loss {row['train/loss']:.4g}")
        words += [f"{name} {row[name]:.4g}" for name in row if is_accuracy(name)]
        words.append(f"{row['time/step_seconds']:.1f} s")
        if (left := self._seconds_left(self._last_logged)) is not None:
            words.append(f"{timedelta(seconds=round(left))} left")
        return words

    def _seconds_left(self, now: float) -> float | None:
        """The time left by the pace of the steps after the first: that one carries what is only done once."""
        if self._steps is None or self._first_logged is None or self._step is None:
            return None
        first, began = self._first_logged
        if self._step <= first:
            return None
        pace = (self._last_logged - began) / (self._step - first)
        return max(0.0, pace * (self._steps - self._step) - (now - self._last_logged))

    def _sparkline(self) -> str:
        blocks = _BLOCKS if (self.console.encoding or "").lower().startswith("utf") else _BLOCKS_ASCII
        course = tuple(self._course)  # another thread may add to it
        least, most = min(course), max(course)
        scale = (len(blocks) - 1) / (most - least) if most > least else 0.0
        return "".join(blocks[round((value - least) * scale)] for value in course)


def _shares(phase_seconds: Mapping[str, float]) -> str:
    """Phases by their share of the time, the longest first."""
    total = sum(phase_seconds.values())
    order = sorted(phase_seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds:.1f} s ({seconds / total:.0%})" for name, seconds in order if seconds >= 0.05)
