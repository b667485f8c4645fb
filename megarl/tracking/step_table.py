"""Table of a run's steps on the screen: short numbers, fixed columns, a repeated header."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from megarl.tracking.health import heldout_metrics

LINE_CHARACTERS = 100
"""Longest line of the table. Columns beyond it are left out."""
LINES_PER_HEADER = 20
"""Step lines per header. In a terminal of 24 lines, a header is then visible most of the time."""


class _Column(NamedTuple):
    label: str
    width: int
    """Number of characters. Numbers have at most 7, or 6 if they cannot be negative."""
    metrics: tuple[str, ...]
    """The column shows the first of these metrics that the run logs."""


# Signs of reward hacking, from reward to entropy, are next to each other.
_COLUMNS = (
    _Column("diverg.", 7, ("distillation/divergence", "distillation/reverse_kl")),
    _Column("reward", 7, ("reward/mean",)),
    _Column("loss", 7, ("train/loss",)),
    _Column("accuracy", 8, ("reward/accuracy", "preference/accuracy")),
    _Column("length", 6, ("rollout/completion_tokens/mean",)),
    _Column("trunc.", 6, ("rollout/truncated",)),
    _Column("KL", 7, ("kl/reference", "kl/update")),
    _Column("gap", 6, ("logprob_gap/mean",)),
    _Column("entropy", 7, ("train/entropy",)),
    _Column("tok/s/rank", 10, ("perf/tokens_per_second_per_rank",)),
)
_SECONDS_WIDTH = 6
_LEFT_WIDTH = 7


class StepTable:
    """Table of steps and their metrics in the terminal of a run, one line per step."""

    def __init__(self) -> None:
        self.steps: int | None = None
        self._labels: tuple[str, ...] = ()
        self._lines_left = 0
        self._last_step: int | None = None
        """Step of the last line of numbers."""

    def lines(
        self, step: int, row: Mapping[str, float], seconds_left: float | None, *, max_characters: int = LINE_CHARACTERS
    ) -> list[str]:
        """Return the lines of a step: a header if due, numbers, then results of validation sets.

        A header is due after 20 lines, or for other columns. `row` maps metric names to values. Validation sets have
        their own lines, because their names may be long. Columns beyond `max_characters` are left out. A step with only
        results has no line of numbers. A second call for a step prints only results.
        """
        line_start = f"step {step}" + (f"/{self.steps}" if self.steps else "")
        # If the number of steps is unknown, leave space for six digits.
        line_start = line_start.ljust(len(f"step {self.steps}/{self.steps}") if self.steps else len("step 123456"))
        values = _values_by_label(row)
        results = [f"{name}={short_number(row[name])}" for name in heldout_metrics([row])]
        if step == self._last_step:
            return _wrap(results, " " * (len(line_start) + 2), max_characters)
        if results and not values:
            return _wrap(results, f"{line_start}  ", max_characters)
        self._last_step = step
        columns = self._columns(values, max_characters - len(line_start))
        text_by_label = {label: short_number(value) for label, value in values.items()}
        text_by_label |= {"s/step": _seconds(row["time/step_seconds"]), "left": left_text(seconds_left)}
        lines = []
        if self._lines_left == 0:
            lines.append(" " * len(line_start) + "".join(f" {label:>{width}}" for label, width in columns.items()))
            self._lines_left = LINES_PER_HEADER
        self._lines_left -= 1
        lines.append(
            line_start + "".join(f" {text_by_label.get(label, '-'):>{width}}" for label, width in columns.items())
        )
        return [line.rstrip() for line in lines] + _wrap(results, " " * (len(line_start) + 2), max_characters)

    def _columns(self, values: Mapping[str, float], max_characters: int) -> dict[str, int]:
        """Return labels and widths of the columns that fit into `max_characters`. A new column needs a new header."""
        labels = tuple(column.label for column in _COLUMNS if column.label in self._labels or column.label in values)
        if labels != self._labels:
            self._labels, self._lines_left = labels, 0
        widths = {column.label: column.width for column in _COLUMNS if column.label in labels}
        time_columns = {"s/step": _SECONDS_WIDTH, "left": _LEFT_WIDTH}
        while widths and sum(width + 1 for width in (*widths.values(), *time_columns.values())) > max_characters:
            widths.popitem()
        return widths | time_columns


def _values_by_label(row: Mapping[str, float]) -> dict[str, float]:
    """Return the value of each column by label. With a reward, the loss is left out."""
    values = {}
    for column in _COLUMNS:
        name = next((name for name in column.metrics if name in row), None)
        if name is not None and not (name == "train/loss" and "reward/mean" in row):
            values[column.label] = row[name]
    return values


def _wrap(words: list[str], line_start: str, max_characters: int) -> list[str]:
    """Return lines of whole words after `line_start`. Further lines are indented by its width."""
    return textwrap.wrap(
        " ".join(words),
        max_characters,
        initial_indent=line_start,
        subsequent_indent=" " * len(line_start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def short_number(value: float) -> str:
    """Return a number in at most 7 characters: `11.1k`, `31.50`, `0.250`, `0.0123`, `1.2e-4`, `-0.250`, `nan`.

    Only numbers beyond 1e15 or below 1e-99 need more.
    """
    magnitude = abs(value)
    if not math.isfinite(value) or magnitude == 0:
        return f"{value:.0f}"
    if magnitude < 0.001:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    # At these limits, rounding would add a digit: 999.95 would become 1000.0.
    for limit, digits in ((0.1, 4), (9.9995, 3), (99.995, 2), (999.95, 1)):
        if magnitude < limit:
            return f"{value:.{digits}f}"
    for power, suffix in enumerate("kMGT", start=1):
        if magnitude < 999.5 * 1000**power:
            # "#" keeps trailing zeros, and the dot after three digits.
            return f"{value / 1000**power:#.3g}".rstrip(".") + suffix
    return f"{value:.1e}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 9999.95 else short_number(seconds)


def left_text(seconds: float | None) -> str:
    """Return a duration in at most 7 characters: `0:27:05`, `12.5 h`, `4.2 d`. None gives an empty text."""
    if seconds is None:
        return ""
    num_seconds = round(seconds)
    if num_seconds < 36_000:
        return f"{num_seconds // 3600}:{num_seconds // 60 % 60:02}:{num_seconds % 60:02}"
    # A long run's estimate is not exact enough for minutes.
    if num_seconds < 360_000:
        return f"{num_seconds / 3600:.1f} h"
    days = num_seconds / 86_400
    return f"{days:.1f} d" if days < 1000 else f"{short_number(days)} d"
