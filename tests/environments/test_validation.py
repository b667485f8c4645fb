"""Values of environments that are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.environments import Step
from megarl.environments.validation import ROLLOUT_METRICS, copy_valid_step
from megarl.tracking.metric_table import rows


def test_the_names_of_rollouts_are_those_of_the_table() -> None:
    measured = {
        row.name.removeprefix("rollout/")
        for row in rows()
        if row.name.startswith("rollout/") and row.module == "megarl.rollout.step.step_metrics"
    }
    of_sources = {row.name.removeprefix("environment/SOURCE/") for row in rows() if "environment/SOURCE/" in row.name}
    assert {name for name in measured if name == name.lower()} | of_sources | {"process_killed"} == ROLLOUT_METRICS
    assert "environment/process_killed" in {row.name for row in rows()}


@pytest.mark.parametrize("name", [*sorted(ROLLOUT_METRICS), "ended/done", "errors/KeyError", "reward/mean", "time/x"])
def test_a_metric_of_every_rollout_is_not_replaced(name: str) -> None:
    with pytest.raises(ValueError, match=f"returned the metric '{name}'"):
        copy_valid_step(Step(metrics={name: 1.0}))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"done": "false"}, "done"),
        ({"done": None}, "done"),
        ({"answer_correct": 0.5}, "answer_correct"),
        ({"answer_correct": "no"}, "answer_correct"),
    ],
)
def test_a_verdict_is_true_or_false(values: dict[str, Any], field: str) -> None:
    with pytest.raises(TypeError, match=f"returned {field} = "):
        copy_valid_step(Step(**values))


def test_verdicts_of_numpy_are_verdicts() -> None:
    step: Any = {"done": np.bool_(True), "answer_correct": np.bool_(False)}
    assert copy_valid_step(Step(**step)) == Step(done=True, answer_correct=False)


@pytest.mark.parametrize("name", ["guesses", "tools/invalid", "shares", "my/turns"])
def test_other_metrics_are_an_environment_s_own(name: str) -> None:
    assert copy_valid_step(Step(metrics={name: 1.0})).metrics == {name: 1.0}
