"""The check of staleness at its smallest size: a row for each bound and correction, and the verdict."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import check
from tools.checks import staleness
from tools.make_dataset import make_dataset
from tools.runs import read_lines


@pytest.mark.distributed
@pytest.mark.long
def test_a_bound_is_measured_with_and_without_correction(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    make_dataset(tmp_path / "runs/quickstart_input/data", sft=8, train=16, heldout=4)
    # In place of the student, whose training takes minutes.
    shutil.copytree(tiny_model(num_layers=2), tmp_path / "runs" / staleness.START / "hf")
    results = tmp_path / "results.jsonl"
    assert check.main(["staleness", "--size", "small", "--work", str(tmp_path), "--json", str(results)]) == 0
    rows = read_lines(results)
    assert [(row["staleness"], row["correction"]) for row in rows] == [(1, "tis"), (1, "none")]
    assert all(len(row["accuracies"]) == 1 and row["samples_per_second"] > 0 for row in rows)


@pytest.mark.parametrize(("one_step_off", "met"), [((0.5, 0.3), True), ((0.3, 0.3), False)])
def test_one_step_off_is_held_against_the_seeds(one_step_off: tuple[float, float], met: bool) -> None:
    accuracies = {0: (0.35, 0.45), 1: one_step_off}
    rows = [
        {"staleness": bound, "correction": "tis", "mean": sum(found) / 2, "least": min(found)}
        for bound, found in accuracies.items()
    ]
    staleness.judge(rows)
    assert [row.get("met") for row in rows] == [None, met]
