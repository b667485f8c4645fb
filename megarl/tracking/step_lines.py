"""Lines of metrics.jsonl: one per step, and a second one if the step is evaluated.

Lines are checked when read, because the file may be old, incomplete, or edited.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from megarl.files.strict_json import loads
from megarl.tracking.renamed_metrics import current_metrics

_FOLLOWS = "evaluation_follows"
"""Field of a step's line. True: the step's evaluation follows in another line."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """A step's line. `metrics` have current names. NaN: the value was not finite."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation_follows: bool = False

    @classmethod
    def read(cls, line: bytes, max_values: int | None = None) -> Self | None:
        """Return the line, without values that are not numbers.

        None: the line is not a JSON object with a step, or has more than `max_values` values.
        """
        try:
            row = loads(line, max_values)
        except ValueError:
            return None
        step = row.get("step") if isinstance(row, dict) else None
        if not _is_number(step) or math.isnan(_number(step)):
            return None
        return cls(int(_number(step)), numbers_of(row), row.get(_FOLLOWS) is True)

    def as_json(self) -> dict[str, Any]:
        return {"step": self.step, **({_FOLLOWS: True} if self.evaluation_follows else {}), **self.metrics}

    def is_continued_by(self, line: StepLine) -> bool:
        return self.evaluation_follows and self.step == line.step

    def with_evaluation(self, line: StepLine) -> StepLine:
        """Return the whole step: this line's metrics and the evaluation's.

        If both have a metric, for example a time, the evaluation's value covers the whole step.
        """
        return replace(line, metrics={**self.metrics, **line.metrics})


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a JSON object by their metrics' current names."""
    metrics = {name: _number(value) for name, value in row.items() if name != "step" and _is_number(value)}
    return current_metrics(metrics)


def read_steps(lines: Iterable[bytes]) -> Iterator[StepLine]:
    """Yield the steps in lines of the file, joined with their evaluations. Unreadable lines are left out."""
    return join_steps(filter(None, map(StepLine.read, lines)))


def join_steps(lines: Iterable[StepLine]) -> Iterator[StepLine]:
    """Yield the steps in order, each joined with its evaluation. A step trained again is yielded again."""
    step: StepLine | None = None
    for line in lines:
        if step is not None and step.is_continued_by(line):
            step = step.with_evaluation(line)
            continue
        if step is not None:
            yield step
        step = line
    if step is not None:
        yield step


def _is_number(value: Any) -> bool:
    # Python counts bool as an int, so exclude it.
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: float | None) -> float:
    """Return a logged number. NaN for null: the value was not finite."""
    try:
        return math.nan if value is None or not math.isfinite(value) else float(value)
    # A JSON integer may be too large for a float.
    except OverflowError:
        return math.nan
