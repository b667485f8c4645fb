"""Metrics of older runs are read by their current names."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.tracking.metric_table import find_row, rows
from megarl.tracking.renamed_metrics import RENAMED, current_metrics, current_name, renamed_error
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.step_lines import StepLine


def test_the_table_has_all_new_names_and_no_old_one() -> None:
    names = {row.name for row in rows()}
    assert set(RENAMED.values()) <= names
    assert [old for old in RENAMED if old in names or find_row(old) is not None] == []
    assert [old for old, new in RENAMED.items() if new in RENAMED or old == new] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rollout/kept", "rollout/groups_passing_filter"),
        ("environment/sums/curriculum/passed", "environment/sums/curriculum/skipped"),
        ("environment/sums/tools/truncated", "environment/sums/tools/shortened"),
        ("environment/sums/kept_tokens/max", "environment/sums/candidates_left/max"),
        # Numbers of a user's environment, and metrics that no mixture logs for a source.
        ("environment/kept_tokens", "environment/kept_tokens"),
        ("environment/sums/attempts", "environment/sums/attempts"),
        ("environment/sums/given_up", "environment/sums/given_up"),
        ("environment/sums/passed", "environment/sums/passed"),
        ("reward/code/passed", "reward/code/passed"),
        ("rollout/kept_tokens", "rollout/kept_tokens"),
        ("step", "step"),
    ],
)
def test_a_name_is_read_as_its_current_one(name: str, expected: str) -> None:
    assert current_name(name) == expected
    error = renamed_error(name)
    assert error is None if name == expected else (error and expected in error)
    assert current_name(expected) == expected


def test_two_names_that_became_one_are_added() -> None:
    assert current_metrics({"tools/truncated": 1.5, "tools/shortened": 0.5}) == {"tools/shortened": 2.0}
    assert current_metrics({"tools/shortened": 0.5, "tools/truncated": None}) == {"tools/shortened": None}
    assert current_metrics({"step": 3, "rollout/kept": 0.25}) == {"step": 3, "rollout/groups_passing_filter": 0.25}


def test_reports_and_resumed_runs_read_old_lines(tmp_path: Path) -> None:
    old = {"step": 1, "entropy/kept": 0.2, "rollout/held_seconds": None, "train/loss": 0.5}
    line = json.dumps(old).encode() + b"\n"
    assert (read := StepLine.read(line)) is not None
    assert read.step == 1 and set(read.metrics) == {"entropy/trained_share", "rollout/paused_seconds", "train/loss"}
    recipe = Recipe.model_validate(
        {"name": "old", "loop": "rl", "runs_folder": str(tmp_path), "model": {"path": "m"}, "data": {"train": "t"}}
    )
    with RunFolder(recipe) as folder:
        folder.metrics_file.write_bytes(line)
        [logged] = folder.logged_steps()
        assert logged.metrics == pytest.approx(
            {"entropy/trained_share": 0.2, "rollout/paused_seconds": math.nan, "train/loss": 0.5}, nan_ok=True
        )
        assert folder.metrics_file.read_bytes() == line, "the file stays as it was written"


def test_an_interrupted_step_of_an_older_version_is_logged_by_new_names(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {"name": "old", "loop": "rl", "runs_folder": str(tmp_path), "model": {"path": "m"}, "data": {"train": "t"}}
    )
    with RunFolder(recipe) as folder:
        folder.begin(4, unlogged={"rollout/given_up": 3.0, "train/loss": 0.5})
        [step] = folder.logged_steps()
    assert step == StepLine(4, {"rollout/dropped_groups": 3.0, "train/loss": 0.5}, evaluation_follows=True)
