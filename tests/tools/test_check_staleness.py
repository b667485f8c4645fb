"""What staleness costs and gains, at the smallest size: a line for each bound and correction, and the verdict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import TOOLS

SMALLEST = "--staleness 1 --seeds 0 --steps 2 --prompts 2 --samples 2"


@pytest.fixture
def check(tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    return tool("check_staleness")


def test_a_bound_is_measured_with_and_without_correction(
    check: ModuleType, tool: Callable[[str], ModuleType], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    tool("make_dataset").make_dataset(tmp_path / "runs/quickstart_input/data", sft=8, train=16, heldout=4)
    # In place of the student, whose training takes minutes.
    shutil.copytree(tiny_model(num_layers=2), tmp_path / "runs" / check.START / "hf")
    results = tmp_path / "results.jsonl"
    assert check.main([*SMALLEST.split(), "--work", str(tmp_path), "--json", str(results)]) == 0
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(line["staleness"], line["correction"]) for line in lines] == [(1, "tis"), (1, "none")]
    assert all(len(line["accuracies"]) == 1 and line["samples_per_second"] > 0 for line in lines)


@pytest.mark.parametrize(("one_step_off", "status"), [((0.5, 0.3), 0), ((0.3, 0.3), 1)])
def test_one_step_off_is_held_against_the_seeds(
    check: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_step_off: tuple[float, float],
    status: int,
) -> None:
    found = {0: [0.35, 0.45], 1: [*one_step_off]}
    lines = [
        {"staleness": staleness, "correction": "tis", "accuracies": accuracies, "samples_per_second": 1.0}
        for staleness, accuracies in found.items()
    ]
    monkeypatch.setattr(check, "measured", lambda options: lines)
    (tmp_path / "runs" / check.START / "hf").mkdir(parents=True)
    assert check.main(["--work", str(tmp_path)]) == status
