"""Lines of metrics.jsonl: a step and its evaluation are joined, and lines of strangers are checked."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from megarl.tracking.step_lines import StepLine, join_steps
from megarl.tracking.step_table import StepTable


def lines(*rows: dict[str, Any]) -> list[StepLine]:
    read = [StepLine.read(json.dumps(row).encode()) for row in rows]
    assert None not in read
    return [line for line in read if line is not None]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[1]", b"{}", b'{"step": "1"}', b'{"step": true}', b'{"step": Infinity}', b'{"step": NaN}', b"{\xff}",
        b'{"step": [1]}', b'{"step": null}', b'{"step": %s}' % (b"9" * 400), b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_line_without_a_step_is_none(content: bytes) -> None:
    assert StepLine.read(content) is None


def test_a_line_with_too_many_values_is_none() -> None:
    content = json.dumps({"step": 1, **{f"m{number}": 1.0 for number in range(50)}}).encode()
    assert StepLine.read(content, 20) is None and StepLine.read(content, 60) is not None


def test_values_that_are_no_numbers_are_left_out_and_infinite_ones_are_nan() -> None:
    content = b'{"step": 2.0, "a": "x", "b": true, "c": [1], "d": 1e999, "e": null, "f": 3, "g": %s}' % (b"9" * 400)
    line = StepLine.read(content)
    assert line is not None and line.step == 2 and set(line.metrics) == {"d", "e", "f", "g"}
    assert line.metrics["f"] == 3.0 and all(math.isnan(line.metrics[name]) for name in "deg")
    assert not line.evaluation_follows


def test_a_step_and_its_evaluation_are_one_and_a_step_trained_again_comes_again() -> None:
    follows = {"evaluation_follows": True}
    steps = [*join_steps(lines(
        {"step": 0, "val/a/accuracy": 0.1},
        {"step": 1, "x": 1.0},
        {"step": 2, "x": 2.0, "time/step_seconds": 3.0, **follows},
        {"step": 2, "val/a/accuracy": 0.2, "time/step_seconds": 5.0},
        # Trained again, and killed before its evaluation; then the next one.
        {"step": 2, "x": 4.0, **follows}, {"step": 3, "x": 5.0}, {"step": 3, "x": 6.0},
    ))]  # fmt: skip
    assert [(step.step, dict(step.metrics), step.evaluation_follows) for step in steps] == [
        (0, {"val/a/accuracy": 0.1}, False),
        (1, {"x": 1.0}, False),
        (2, {"x": 2.0, "val/a/accuracy": 0.2, "time/step_seconds": 5.0}, False),
        (2, {"x": 4.0}, True),
        (3, {"x": 5.0}, False),
        (3, {"x": 6.0}, False),
    ]
    assert lines(steps[3].as_json()) == [steps[3]]


def test_an_evaluation_is_printed_below_its_step() -> None:
    table = StepTable()
    row = {"reward/mean": 0.5, "time/step_seconds": 1.0}
    results = {"val/a/accuracy": 0.25}
    assert len(table.lines(2, row, None)) == 2
    [line] = table.lines(2, results, None)
    assert line.split() == ["val/a/accuracy=0.250"] and line.startswith(" ")
    # A loss has no line of its own.
    assert table.lines(2, {"val/a/loss": 0.25, "time/step_seconds": 2.0}, None) == []
    [line] = table.lines(4, results, None)
    assert line.split() == ["step", "4", "val/a/accuracy=0.250"]
    assert table.lines(5, {**row, **results}, None)[-1].split() == ["val/a/accuracy=0.250"]
