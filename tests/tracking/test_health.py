"""Rules over a run's metrics: what breaks each, what does not, and that each warns once."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.config import Recipe
from megarl.config.sections.health import HealthConfig
from megarl.tracking.display import Display
from megarl.tracking.health import (
    RULES,
    Finding,
    Health,
    is_accuracy,
    unusual_learning_rate,
    usual_learning_rates,
)
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.step_lines import StepLine
from megarl.tracking.tracker import Tracker

Rows = list[dict[str, float]]

QUICKSTART = [
    # step, reward, std, flat groups, entropy, grad norm, gap, truncated, done, val: a run that learns, as recorded
    (0, None, None, None, None, None, None, None, None, 0.485),
    (1, 0.64844, 0.47746, 0.28125, 0.07192, 0.19859, 4e-7, 0.0, 1.0, None),
    (2, 0.54688, 0.4978, 0.35938, 0.08159, 0.20694, 4e-7, 0.0, 1.0, None),
    (3, 0.63867, 0.48039, 0.3125, 0.07403, 0.19866, 4e-7, 0.0, 1.0, None),
    (18, 0.89062, 0.31211, 0.6875, 0.01457, 0.1372, 4e-7, 0.0, 1.0, None),
    (19, 0.89648, 0.30463, 0.84375, 0.01323, 0.10043, 4e-7, 0.0, 1.0, None),
    (20, 0.91602, 0.27736, 0.6875, 0.01395, 0.1339, 4e-7, 0.0, 1.0, 0.95),
    (37, 0.9375, 0.24206, 0.78125, 0.01025, 0.10493, 4e-7, 0.0, 1.0, None),
    (38, 0.91797, 0.27441, 0.70312, 0.0131, 0.1614, 4e-7, 0.00195, 0.99805, None),
    (39, 0.90234, 0.29685, 0.75, 0.0127, 0.09516, 4e-7, 0.0, 1.0, None),
    (40, 0.89062, 0.31211, 0.78125, 0.01395, 0.09008, 4e-7, 0.0, 1.0, 0.96),
]
NAMES = (
    "step", "reward/mean", "reward/std", "reward/zero_variance_groups", "train/entropy", "train/grad_norm",
    "logprob_gap/mean", "rollout/truncated", "rollout/ended/done", "val/heldout/accuracy",
)  # fmt: skip
SOUND = [{name: value for name, value in zip(NAMES, row, strict=True) if value is not None} for row in QUICKSTART]


def series(metric: str, values: Iterable[float]) -> Rows:
    return [{"step": step, metric: value} for step, value in enumerate(values, 1)]


def hacked(validation: Iterable[float], reward: Iterable[float]) -> Rows:
    """An evaluation before the first step and after each second one."""
    rows = [{"step": step, "reward/mean": value} for step, value in enumerate(reward, 1)]
    first, *later = validation
    for number, value in enumerate(later, 1):
        rows[2 * number - 1]["val/heldout/accuracy"] = value
    return [{"step": 0, "val/heldout/accuracy": first}, *rows]


def observed(rows: Iterable[Mapping[str, Any]], **config: Any) -> list[Finding]:
    health = Health(HealthConfig(**config))
    return [finding for row in rows for finding in health.observe(row["step"], row)]


BROKEN = {
    "no_gradient": (series("reward/zero_variance_groups", [0.5, 1.0, 1.0, 1.0]), 4, 1.0),
    "constant_reward": (series("reward/std", [0.0, 0.0, 0.0]), 3, 0.0),
    "entropy_collapsed": (series("train/entropy", [0.3, 0.02, 9e-4, 3e-4, 9e-5]), 5, 9e-5),
    "entropy_exploding": (series("train/entropy", [0.3, 0.3, 0.4, 0.9, 2.0, 2.5, 3.0]), 6, 2.0),
    "grad_norm_rising": (series("train/grad_norm", [0.0, 0.2, 0.1, 0.2, 1.0, 5.0, 9.0, 7.0]), 7, 5.0),
    "mismatch_rising": (series("logprob_gap/mean", [1e-3, 1e-3, 2e-3, 1e-2, 2e-2, 9e-2]), 6, 2e-2),
    "lost_in_merge": (series("lora/lost_in_merge", [0.99, 0.3, 0.31, 0.4, 0.5]), 5, 0.5),
    "truncated": (series("rollout/truncated", [0.9, 0.96, 1.0, 0.99]), 4, 0.99),
    "no_end_of_sequence": (series("rollout/ended/done", [0.1, 0.0, 0.0, 0.0]), 4, 0.0),
    "validation_falling": (hacked([0.5, 0.6, 0.5, 0.4], [0.5, 0.5, 0.6, 0.7, 0.8, 0.9]), 6, 0.4),
}
"""Numbers that break each rule, the step at which it warns, and the value that it shows."""

FINE = [
    ("no_gradient", series("reward/zero_variance_groups", [1.0, 1.0, 0.99, 1.0, 1.0])),
    ("constant_reward", series("reward/std", [0.0, 0.0, 1e-9, 0.0])),
    ("entropy_collapsed", series("train/entropy", [9e-5, 9e-5, 2e-3, 9e-5])),
    ("entropy_exploding", series("train/entropy", [0.01, 0.01, 0.01, 0.9, 0.9, 0.9])),
    ("entropy_exploding", series("train/entropy", [2.0, 2.0, 2.0, 3.0, 3.0, 3.0])),
    ("grad_norm_rising", series("train/grad_norm", [0.2, 0.2, 0.2, 1.9, 1.9, 90.0, 0.1])),
    ("mismatch_rising", series("logprob_gap/mean", [1e-6, 1e-6, 1e-6, 9e-3, 9e-3, 9e-3])),
    ("lost_in_merge", series("lora/lost_in_merge", [0.9, 0.9, 0.3, 0.9, 0.9])),
    ("truncated", series("rollout/truncated", [1.0, 1.0, 0.9, 1.0, 1.0])),
    ("no_end_of_sequence", series("rollout/ended/done", [0.0, 0.0, 0.01, 0.0])),
    # One evaluation may be chance; where the reward does not rise, it is not earned at the answers' expense.
    ("validation_falling", hacked([0.5, 0.6, 0.5, 0.58], [0.5, 0.5, 0.6, 0.7, 0.8, 0.9])),
    ("validation_falling", hacked([0.5, 0.6, 0.5, 0.4], [0.5] * 6)),
]
"""Numbers that are near to breaking a rule."""


def test_every_rule_is_tested() -> None:
    assert BROKEN.keys() == {rule for rule, _ in FINE} == {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_warns_once_with_metric_value_and_advice(rule: str) -> None:
    rows, step, value = BROKEN[rule]
    # What is wrong stays so for a while.
    after = [rows[-1] | {"step": rows[-1]["step"] + more} for more in (1, 2, 3)]
    [finding] = observed([*rows, *after])
    assert (finding.rule, finding.step, finding.value) == (rule, step, value)
    assert finding.metric in rows[-1] and finding.metric in finding.text and "Try this: " in finding.text
    assert observed(rows, off=(rule,)) == []


@pytest.mark.parametrize(("rule", "rows"), FINE)
def test_a_rule_that_is_not_broken_says_nothing(rule: str, rows: Rows) -> None:
    assert rule not in {finding.rule for finding in observed(rows)}


@pytest.mark.parametrize(
    ("rule", "rows", "config", "warns"),
    [
        ("truncated", series("rollout/truncated", [0.95] * 3), {}, True),
        ("entropy_collapsed", series("train/entropy", [1e-3] * 3), {}, False),
        ("entropy_exploding", series("train/entropy", [0.25] * 3 + [1.25] * 3), {}, True),
        ("entropy_exploding", series("train/entropy", [0.125] * 3 + [1.0] * 3), {}, True),
        ("grad_norm_rising", series("train/grad_norm", [0.25] * 3 + [2.5] * 3), {}, True),
        (
            "validation_falling",
            hacked([0.5, 0.75, 0.5, 0.5], [0.5, 0.5, 0.75, 0.75, 0.75, 0.75]),
            {"validation_drop": 0.25, "reward_rise": 0.25},
            True,
        ),
    ],
)
def test_a_value_at_its_threshold(rule: str, rows: Rows, config: dict[str, float], warns: bool) -> None:
    assert (rule in {finding.rule for finding in observed(rows, **config)}) is warns


def test_a_learning_rate_at_the_ends_of_its_range_is_usual() -> None:
    usual = usual_learning_rates(128, has_lora=False)
    assert usual == (1e-8, 1 / 128)
    assert [unusual_learning_rate(rate, usual) for rate in usual] == [None, None]
    low, high = unusual_learning_rate(1e-9, usual), unusual_learning_rate(1e-2, usual, step=4)
    assert low is not None and "hardly change" in low.problem and low.step == 0
    assert high is not None and "destroyed" in high.problem and high.step == 4


def test_accuracies_of_whole_validation_sets_are_told_from_other_metrics() -> None:
    names = ["val/math/accuracy", "val/math/easy/accuracy", "train/math/accuracy", "val/math/mean", "val/accuracy"]
    assert [name for name in names if is_accuracy(name)] == ["val/math/accuracy"]


def test_a_run_that_learns_breaks_no_rule() -> None:
    assert observed(SOUND) == []


def test_missing_and_infinite_numbers_are_not_evidence() -> None:
    rows = series("train/entropy", [9e-5, float("nan"), 9e-5])
    assert observed([*rows, {"step": 4, "reward/mean": 1.0}]) == []
    [finding] = observed([*rows, {"step": 4, "train/entropy": 9e-5}])
    assert finding.step == 4


def test_thresholds_are_the_recipes() -> None:
    rows = series("rollout/truncated", [0.5, 0.6])
    [finding] = observed(rows, window=2, truncated=0.5)
    assert finding.step == 2 and observed(rows) == []


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[StepLine]:
    return [StepLine(row["step"], {name: row[name] for name in row if name != "step"}) for row in rows]


def test_a_rule_that_has_warned_before_a_resume_does_not_warn_again() -> None:
    rows, *_ = BROKEN["truncated"]
    resumed = Health(HealthConfig())
    resumed.replay(lines_of(rows))
    assert resumed.observe(5, {"rollout/truncated": 1.0}) == []
    half = Health(HealthConfig())
    half.replay(lines_of(rows[:-1]))
    [finding] = half.observe(4, rows[-1])
    assert finding.rule == "truncated", "the steps before the resume count"


@pytest.mark.parametrize(
    ("rate", "hidden_size", "has_lora", "is_usual"),
    [
        (4e-3, 128, False, True),  # the quickstart's
        (1.0, 128, False, False),
        (1e-6, 5120, False, True),
        (1e-3, 5120, False, False),
        (1e-3, 5120, True, True),
        (1e-9, 128, False, False),
    ],
)
def test_the_usual_learning_rates(rate: float, hidden_size: int, has_lora: bool, is_usual: bool) -> None:
    finding = unusual_learning_rate(rate, usual_learning_rates(hidden_size, has_lora=has_lora))
    assert (finding is None) is is_usual
    if finding is not None:
        assert (finding.metric, finding.value) == ("optimizer.learning_rate", rate)
        assert "health.learning_rate" in finding.text


def recipe_in(folder: Path) -> Recipe:
    sections = {"name": "small", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
    return Recipe.model_validate({**sections, "runs_folder": str(folder)})


def test_a_finding_is_on_the_screen_in_status_tensorboard_and_notices_and_outlives_a_resume(tmp_path: Path) -> None:
    rows, *_ = BROKEN["truncated"]
    [finding] = observed(rows)
    text = io.StringIO()
    with RunFolder(recipe_in(tmp_path)) as folder:
        folder.begin()
        tracker = Tracker(folder, display=Display(Console(file=text, width=40)))
        tracker.unhealthy(finding)
        tracker.close()
    assert f"warning: {finding.text}" in text.getvalue()
    [recorded] = json.loads((folder.path / "status.json").read_text())["health"]
    assert recorded == finding.as_json() and recorded["rule"] == "truncated"
    notices = [json.loads(line)["text"] for line in (folder.logs_folder / "notices.jsonl").read_text().splitlines()]
    assert notices == [finding.text]
    events = EventAccumulator(str(folder.tensorboard_folder)).Reload()
    [event] = events.Tensors("health/truncated/text_summary")
    assert event.step == 4 and event.tensor_proto.string_val[0].decode() == finding.text
    with RunFolder(recipe_in(tmp_path), resume=True) as resumed:
        resumed.begin(2)
        assert [one["rule"] for one in resumed.findings] == ["truncated"]
